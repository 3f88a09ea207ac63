"""The quickstart's own model and data, made deterministically on first use (`made:` paths)."""
