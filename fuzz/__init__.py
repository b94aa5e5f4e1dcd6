"""Fuzzing of whatever reads bytes of strangers.

Each module in `targets` has `check(data)`, which must hold for all bytes and says in its first
line what that is, and `INPUTS`, a hypothesis strategy of bytes near the interesting ones.
Not here: fuzzing of a running broker, which is tests/http/test_api_fuzz.py.
`make fuzz` runs them (fuzz/__main__.py); seeds/ is replayed by tests/fuzz/test_seeds.py.
"""
