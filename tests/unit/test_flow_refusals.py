"""What ends a flow before its first task: settings that nobody knows, and a Prefect server that is gone."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from flows.grpo_train import grpo_train
from keepstep.actor.build import _packed_attention
from keepstep.cli.run_command import _blame_prefect, flow_parameters
from keepstep.config.load import as_overrides, load
from keepstep.errors import ConfigError, KeepstepError


def test_an_unknown_setting_of_a_deployment_ends_it_by_name():
    """As a state, not as an exception: Prefect would log that twice with its traceback."""
    state = grpo_train.fn("quickstart", {"trainer.save_frq": 5})
    assert state.name == "NotRetryable" and state.is_failed()
    assert "trainer.save_frq" in state.message and "trainer.save_freq" in state.message


def test_all_that_is_added_to_a_list_reaches_the_flow():
    given = ["--resume.allow+=scheduler", "resume.allow+=exactness", "trainer.save_freq=5"]
    parameters = flow_parameters(None, given, load(None, given))
    config = load(parameters["config"], as_overrides(parameters["overrides"]))
    assert config.resume.allow == ["scheduler", "exactness"] and config.trainer.save_freq == 5


def test_a_lost_prefect_server_is_named():
    with socket.socket() as taken:
        # Bound and not listening: nothing answers there.
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/api"
        with pytest.raises(KeepstepError, match=r"was lost, and the flow with it \(RuntimeError: away\)") as caught:
            _blame_prefect(url, RuntimeError("away"))
    assert "same command goes on" in str(caught.value)


def test_layers_that_do_not_see_everything_cannot_be_packed():
    with pytest.raises(ConfigError, match="layers of sliding_attention"):
        _packed_attention(SimpleNamespace(layer_types=["full_attention", "sliding_attention"]), "/models/a")
