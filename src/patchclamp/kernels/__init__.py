"""HOW: rows, records and a plan in, edited and captured rows out. `reference` is to be read, `fused` to be fast."""
