module github.com/rabbitladder/ladder

go 1.26.0

require (
	github.com/rabbitmq/amqp091-go v1.16.0
	github.com/stretchr/testify v1.12.1
	github.com/testcontainers/testcontainers-go v0.45.0
	go.uber.org/goleak v1.3.0
	pgregory.net/rapid v1.3.0
)
