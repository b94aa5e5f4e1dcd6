"""From the environment to a `Config`, or to every fault in it at once (spec 5).

Three steps: pick the texts of our variables, structure them through cattrs, then look for
contradictions between values that are each fine alone.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from typing import TYPE_CHECKING, Any

import attrs
from cattrs import ClassValidationError, Converter
from cattrs.gen import make_dict_structure_fn, override

from queen_trio.errors import ConfigError

from .checks import contradictions, doubts
from .parsers import UNSPECIFIED_PORT
from .sections import SECTIONS, Config
from .variables import Variable, variables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SHOWN_CHARS = 80  # of a faulty value: enough to recognise it, little enough for one line

VARIABLES: dict[str, Variable] = {
    variable.name: variable for section in SECTIONS.values() for _, variable in variables(section)
}

# Prefixes that nobody else uses: a name that starts so and isn't ours is a slip.
_OUR_PREFIXES = ("QUEEN_", "JWT_", "FILE_BUFFER_", "POP_WAIT_")

# What Kubernetes sets in every pod for a Service that happens to be called queen-something.
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$"
    r"|_PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$"
)


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read the configuration from `environ`, by default from the process's own environment.

    Raises ConfigError with all faults of all variables. An empty text counts as unset; where a
    name and its alias are both set, the name wins with a warning (spec 8.26).
    """
    environ = os.environ if environ is None else environ
    spelled, warnings = _spelled(environ)
    texts = {name: environ[used] for name, used in spelled.items()}

    faults: dict[str, str] = {}
    config = _structure(texts, faults)
    if faults:  # look for contradictions all the same, with defaults for what is broken
        config = _structure({n: t for n, t in texts.items() if n not in faults}, {})
    messages = [
        f"{spelled[name]}={_shown(VARIABLES[name], texts[name])} {faults[name]}"
        for name in VARIABLES
        if name in faults
    ]
    messages += [
        message for names, message in contradictions(config) if not faults.keys() & set(names)
    ]
    if messages:
        raise ConfigError(messages)
    warnings += [*_unknown(environ), *doubts(config, texts)]
    return attrs.evolve(config, warnings=tuple(warnings))


def own_environment() -> dict[str, str]:
    """The process's environment as a child inherits it."""
    return dict(os.environ)


def _spelled(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """For each variable that is set, the spelling to read it by; and warnings."""
    spelled: dict[str, str] = {}
    warnings: list[str] = []
    for name, variable in VARIABLES.items():
        used = [s for s in (name, variable.alias) if s is not None and environ.get(s)]
        if used:
            spelled[name] = used[0]
        if len(used) > 1:
            warnings.append(f"{name} and its alias {variable.alias} are both set: {name} is used")
    return spelled, warnings


def _unknown(environ: Mapping[str, str]) -> Iterator[str]:
    """Names that look like ours and aren't, with the one that was probably meant."""
    aliases = {variable.alias for variable in VARIABLES.values()}
    for name in sorted(environ):
        if (
            not name.startswith(_OUR_PREFIXES)
            or name in VARIABLES
            or name in aliases
            or _SERVICE_LINK.search(name)
            or not name.isidentifier()
        ):
            continue
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        yield f"unknown variable {name}" + (f": did you mean {near[0]}?" if near else "")


def _structure(texts: Mapping[str, str], faults: dict[str, str]) -> Config:
    """Structure the texts; what is wrong is added to `faults`: a name, the end of a sentence."""
    sections: dict[str, Any] = {}
    for title, section in SECTIONS.items():
        names: dict[str, str] = {}
        fields: dict[str, str] = {}
        for field, variable in variables(section):
            names[field] = variable.name
            if variable.name in texts:
                fields[field] = texts[variable.name]
            elif variable.derive is not None:
                fields[field] = variable.derive(texts)
        try:
            sections[title] = _CONVERTER.structure(fields, section)
        except ClassValidationError as error:
            sections[title] = section()
            # A default that follows from a broken variable is no second fault.
            faults.update(
                (names[field], sentence)
                for field, sentence in _field_faults(error)
                if names[field] in texts
            )
    sync = sections["sync"]
    ported = (
        attrs.evolve(peer, port=sync.mesh_port) if peer.port == UNSPECIFIED_PORT else peer
        for peer in sync.peers
    )
    peers = tuple(dict.fromkeys(ported))  # each once, in the order given
    return Config(**sections | {"sync": attrs.evolve(sync, peers=peers)})


def _field_faults(group: ClassValidationError) -> Iterator[tuple[str, str]]:
    """What cattrs collected in one section, as (field, end of a sentence)."""
    faults, others = group.group_exceptions()
    if others:
        raise group  # a fault of ours: each value has a field
    for error, note in faults:
        yield note.name, str(error)


def _converter() -> Converter:
    """A converter that reads each field with the parser of its variable."""
    converter = Converter(detailed_validation=True)
    for section in SECTIONS.values():
        hooks: dict[str, Any] = {
            field: override(struct_hook=_hook(variable)) for field, variable in variables(section)
        }
        converter.register_structure_hook(
            section, make_dict_structure_fn(section, converter, **hooks)
        )
    return converter


def _hook(variable: Variable) -> Any:
    return lambda text, _type: variable.parse(text)


_CONVERTER = _converter()


def _shown(variable: Variable, text: str) -> str:
    if variable.secret:
        return secret_length(text)
    short = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
    return json.dumps(short, ensure_ascii=False)


def secret_length(secret: str | None) -> str:
    """A secret as logs and messages may show it (spec 5): `<unset>` or `<set:32 chars>`."""
    return f"<set:{len(secret)} chars>" if secret else "<unset>"
