"""Routes, a file a subject."""
