"""What the peers share that are tables in PostgreSQL, with psycopg as their driver."""

from __future__ import annotations

import psycopg


async def connect(address: str) -> psycopg.AsyncConnection:
    """Open a connection that commits each statement."""
    return await psycopg.AsyncConnection.connect(address, autocommit=True)


async def run(address: str, *statements: str) -> None:
    """Run statements, each in a transaction of its own."""
    async with await connect(address) as connection:
        for statement in statements:
            await connection.execute(statement.encode())


def driver() -> str:
    """Which psycopg, and whether in C."""
    return f"psycopg {psycopg.__version__} ({psycopg.pq.__impl__})"
