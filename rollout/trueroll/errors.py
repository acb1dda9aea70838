"""PLACEHOLDER"""
from reprlib import Repr


class TruerollError(Exception):
    code = "internal"


class ConfigError(TruerollError):
    code = "invalid_config"


class ModelError(TruerollError):
    code = "invalid_model"


def brief(value):
    return Repr().repr(value)[:80]


def said(cause):
    line = " ".join(str(cause).split())[:300]
    return "".join(character if character.isprintable() else "?" for character in line)
