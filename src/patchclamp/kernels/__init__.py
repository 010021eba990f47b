"""HOW: rows, records and a plan in, edited rows and captured rows out. `reference` is to be read, `fused` to be fast."""
