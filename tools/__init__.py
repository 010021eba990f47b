"""What makes the repository's generated pages; not part of the package."""
