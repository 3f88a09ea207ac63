"""A step of `prefect deploy`: the work pool that a deployment names has to be there before."""

from __future__ import annotations

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists


def ensure_process_pool(name: str) -> dict[str, str]:
    """Make a pool of type `process`, unless it is there. A worker that polls it fills in its template."""
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=name, type="process"))
        except ObjectAlreadyExists:
            pass
    return {"work_pool": name}
