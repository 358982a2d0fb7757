package ladder_test

import (
	"testing"

	"github.com/rabbitladder/ladder/internal/brokertest"
)

func TestMain(m *testing.M) { brokertest.Main(m) }
