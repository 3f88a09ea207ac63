"""What a run is told to do: typed schema, YAML plus `key=value`, nothing heavy on import."""
