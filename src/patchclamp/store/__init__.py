"""Storage for the vectors that ops read, the rows that captures record, and the journals of studies."""
