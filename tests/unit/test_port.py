"""A port in use is named with the process that holds it."""

import os
import socket

import pytest

from keepstep.errors import ConfigError
from keepstep.preflight.port import check_port


def test_held_port_names_its_holder():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"some\.key: port {port} is in use by process {os.getpid()} "):
            check_port(port, "some.key")
    check_port(port, "some.key")
