"""Prefect flows: sequence, retries, parameters."""
