"""Raw codecs: names, widths, dtypes."""

import pytest
import torch

from kv_store.codec import RawCodec, codec_named, raw_codec_name
from messages.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "dtype", "row_bytes"),
    [("raw-float32", torch.float32, 256), ("raw-bfloat16", torch.bfloat16, 128), ("raw-float16", torch.float16, 128)],
)
def test_a_raw_codec_is_found_by_name_and_by_dtype(name: str, dtype: torch.dtype, row_bytes: int) -> None:
    codec = codec_named(name)

    assert (codec.name, codec.dtype, codec.row_bytes(64)) == (name, dtype, row_bytes)
    assert RawCodec(dtype).name == raw_codec_name(dtype) == name


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"raw-int3.*raw-bfloat16"):
        codec_named("raw-int3")


def test_a_dtype_without_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="int64"):
        RawCodec(torch.int64)
