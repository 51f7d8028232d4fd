"""Fixtures that these tests share with others."""

from helpers.servers import server as server
from helpers.servers import warm_server as warm_server
