"""KEEP: the vectors that ops read, and the rows that captures leave."""
