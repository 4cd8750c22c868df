"""Codecs: one chunk of KV <-> bytes, one file each. A file here has a name, and the contract tests.

from workbench.codecs import codec_names, resolve_codec
"""

from workbench.codecs.base import Codec, CorruptDataError, UnrepresentableError
from workbench.codecs.names import codec_names, resolve_codec

__all__ = ["Codec", "CorruptDataError", "UnrepresentableError", "codec_names", "resolve_codec"]
