"""Between processes: messages, and memory that they share."""
