package ladder
