"""Fixtures that the tests of tools share with others."""

from helpers.finished_run import here as here
from helpers.finished_run import run as run
from helpers.finished_run import trained as trained
from helpers.servers import server as server
from helpers.servers import warm_server as warm_server
