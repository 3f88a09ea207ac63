"""Prefect tasks: one engine call each, with its retry policy and its artifact."""
