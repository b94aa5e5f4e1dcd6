"""The sections together: `Config`, and their names in the order of the boot lines."""

from __future__ import annotations

import attrs

from .delivery import AdmissionBand, FlowConfig, JobsConfig, PopConfig
from .server import AuthConfig, LoggingConfig, SecurityConfig, ServerConfig
from .storage import FileBufferConfig, PostgresConfig
from .sync import SyncConfig


@attrs.frozen(kw_only=True)
class Config:
    """The whole configuration; `warnings` are sentences that the boot logs."""

    server: ServerConfig = attrs.field(factory=ServerConfig)
    postgres: PostgresConfig = attrs.field(factory=PostgresConfig)
    pop: PopConfig = attrs.field(factory=PopConfig)
    auth: AuthConfig = attrs.field(factory=AuthConfig)
    sync: SyncConfig = attrs.field(factory=SyncConfig)
    flow: FlowConfig = attrs.field(factory=FlowConfig)
    jobs: JobsConfig = attrs.field(factory=JobsConfig)
    file_buffer: FileBufferConfig = attrs.field(factory=FileBufferConfig)
    security: SecurityConfig = attrs.field(factory=SecurityConfig)
    logging: LoggingConfig = attrs.field(factory=LoggingConfig)
    warnings: tuple[str, ...] = ()

    @property
    def admission_band(self) -> AdmissionBand:
        """The band for the pool as configured; the server may admit fewer connections."""
        return self.flow.admission_band(self.postgres.pool_size)


SECTIONS: dict[str, type[attrs.AttrsInstance]] = {
    "server": ServerConfig,
    "postgres": PostgresConfig,
    "pop": PopConfig,
    "auth": AuthConfig,
    "sync": SyncConfig,
    "flow": FlowConfig,
    "jobs": JobsConfig,
    "file_buffer": FileBufferConfig,
    "security": SecurityConfig,
    "logging": LoggingConfig,
}
