"""From what a run left on disk to one HTML file: evidence (the doctor's) -> history, charts (pure) -> page -> template.

The file stands alone: no network, no script; everything that comes from the run is escaped by the template engine.
"""
