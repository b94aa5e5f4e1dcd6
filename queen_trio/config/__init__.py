"""The configuration: environment variables only, read once, all faults reported together.

`load()` gives a frozen `Config`; nothing else in queen-trio reads the environment. It must not
open a file, a socket or the database: what a value points at is checked by who uses it.
Read `sections.py` for what there is, `load.py` for the rules, then docs/reference/configuration.md,
which `describe.py` writes.
"""

from .delivery import AdmissionBand, FlowConfig, JobsConfig, PopConfig, SubscriptionMode
from .describe import boot_lines, reference_page, table
from .load import load
from .parsers import Peer
from .sections import Config
from .server import (
    AuthConfig,
    DrainParked,
    HttpServer,
    JwtAlgorithm,
    LoggingConfig,
    SecurityConfig,
    ServerConfig,
)
from .storage import FileBufferConfig, PostgresConfig
from .sync import SyncConfig
from .workers import worker_environments

__all__ = [
    "AdmissionBand",
    "AuthConfig",
    "Config",
    "DrainParked",
    "FileBufferConfig",
    "FlowConfig",
    "HttpServer",
    "JobsConfig",
    "JwtAlgorithm",
    "LoggingConfig",
    "Peer",
    "PopConfig",
    "PostgresConfig",
    "SecurityConfig",
    "ServerConfig",
    "SubscriptionMode",
    "SyncConfig",
    "boot_lines",
    "load",
    "reference_page",
    "table",
    "worker_environments",
]
