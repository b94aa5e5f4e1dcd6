"""Who may do what: the roles that a token carries, and what each lets its holder do (spec 2)."""

from __future__ import annotations

from enum import Enum
from typing import Final

from attrs import frozen


class Role(Enum):
    """A role by its name in a token."""

    READ_ONLY = "read-only"
    WRITE_ONLY = "write-only"
    READ_WRITE = "read-write"
    ADMIN = "admin"


class Access(Enum):
    """What a route asks of its caller; the value says so in the reference."""

    PUBLIC = "anyone, without a token"
    ANY_ROLE = "any role"
    LOOK = "looking, which changes nothing"
    PRODUCE = "putting messages in"
    CONSUME = "taking messages out, and whatever else belongs to daily work"
    ADMIN = "deleting in bulk, and operating the broker"

    @property
    def roles(self) -> frozenset[Role]:
        """The roles of which one suffices; empty where none is needed."""
        return _GRANTED[self]


_GRANTED: Final = {
    Access.PUBLIC: frozenset[Role](),
    Access.ANY_ROLE: frozenset(Role),
    Access.LOOK: frozenset({Role.READ_ONLY, Role.READ_WRITE, Role.ADMIN}),
    Access.PRODUCE: frozenset({Role.WRITE_ONLY, Role.READ_WRITE, Role.ADMIN}),
    Access.CONSUME: frozenset({Role.READ_WRITE, Role.ADMIN}),
    Access.ADMIN: frozenset({Role.ADMIN}),
}
_BY_NAME: Final = {role.value: role for role in Role}


@frozen
class Identity:
    """Who sent a request, as their token says; `subject` None is a token without one."""

    subject: str | None
    roles: frozenset[Role]

    def may(self, access: Access) -> bool:
        """Tell whether one of the roles suffices."""
        return access is Access.PUBLIC or not self.roles.isdisjoint(access.roles)


def roles_untrusted(*claims: object) -> frozenset[Role]:
    """Read roles from claims, each a name or a list of names; what names no role counts nothing."""
    names = [name for claim in claims for name in (claim if isinstance(claim, list) else [claim])]
    return frozenset(_BY_NAME[name] for name in names if isinstance(name, str) and name in _BY_NAME)
