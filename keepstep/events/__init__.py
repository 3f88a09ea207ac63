"""The run's event log: events.jsonl, append only, one JSON object a line.

Every event has `time` (ISO 8601, UTC), `attempt` and `event`; the rest depends on the kind (DESIGN section 7).
"""
