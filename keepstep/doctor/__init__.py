"""What is wrong with a run: `evidence` reads what it left, `rules` name causes, `report` puts them in order. Light."""
