"""Objects of one KV group that an earlier version has stored, with their bytes: they are found, and written as then."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import pytest

from tokenloom.core.tiers.namespace import new_namespace
from tokenloom.core.tiers.network.sealed_format import SealedFormat
from tokenloom.core.tiers.object_format import HEADER_BYTES
from tokenloom.tests.core.tiers.slots import (
    NAMESPACE,
    SECRET,
    content_of,
    files_of,
    filled,
    find,
    key_of,
    load,
    open_disk,
)

NUM_BYTES = 17  # of each payload
OF_BLOCKS = NAMESPACE._replace(slot_bytes=(NUM_BYTES,))


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


# Block 2, and block 1 of tenant 7, on a disk.
FILES = {
    "9359f3bb2efa7aab/08/08f225fe08e94a5b1da2da4079fcd1a7647d375cc95624a6c6d65a6fc84b3243": unpacked(
        "eNrLLkvKyU/O5mJkgABBBlQwOfLzbr1fVasvqPlvq994c/7EdvGKlzvaxedm675epSp3jOOT6j+Ol17RsotuOVT+ubg8pdY85mSY"
        "yrJj16LyT3gbORtkZxkLsMXsVDKZ5TH3wK+1DKNgFIyCUTAKRsEoGAWjYBSMglEwCkbBKKA56Llq8orzVoRu7/P+6Waf7FQ3md5N"
        "63H97ufgcOPyTymZI09Hg2gUjIJRMApGwSgYBaNgFIyCUTAKRsEoGHYAAD/aO/0="
    ),
    "9359f3bb2efa7aab/22/227ba5f2c6c9109fe5c44a0696f393379607493a377f522ee27d9a7ae3227d89-7": unpacked(
        "eNrLLkvKyU/O5mJkgABBKM0OpSdHft6t96tq9QU1/231G2/On9guXvFyR7v43Gzd16tU5Y4pVS/9dOykwPynR7zYpn2ebD6N3dPK"
        "vD5I71HtrKrHSrWd4bkVyucjGJuZwxqWPEsJCWMYBaNgFIyCUTAKRsEoGAWjYBSMglEwCkYBzUHJOrdo3UDexLDnX353yciGvTPN"
        "Z7vVto/raf5mZW3vU4mso0E0CkbBKBgFo2AUjIJRMApGwSgYBaNgFAw7AAADnTjk"
    ),
}
# Block 3 as in a remote store, without and with a secret.
VALUES = {
    b"": unpacked(
        "eNrLLkvKyU/O5mJkgABBBlQwOfLzbr1fVasvqPlvq994c/7EdvGKlzvaxedm675epSp3zNbuoYz+/vqsbLmshTkWaoZv4uX3H+VZ"
        "vCuq83LaJb1X70Uqa4K6Trby8SvFRYRbqV9iGAWjYBSMglEwCkbBKBgFo2AUjIJRMApGAc3B+S+sEbcLm1tfsd1IkBLcPuXwtVWL"
        "O9WeszaZBkYKy399qwIANkM5VA=="
    ),
    SECRET: unpacked(
        "eNrLLkvKyU/O5mJkgABBBlQwOfLzbr1fVasvqPlvq994c/7EdvGKlzvaxedm675epSp3zNbuoYz+/vqsbLmshTkWaoZv4uX3H+VZ"
        "vCuq83LaJb1X70Uqa4K6Trby8SvFRYRbqV9iGAWjYBSMglEwCkbBKBgFo2AUjIJRMApGAc3B+S+sEbcLm1tfsd1IkBLcPuXwtVWL"
        "O9WeszaZBkYKy399q7LCcNb1HptNHwStTW+WCWdl/dC7dcnIh11VLSntAnM/pwIAWExGtA=="
    ),
}


def test_blocks_on_a_disk_are_found_and_read(tmp_path: Path) -> None:
    open_disk(tmp_path, namespace=OF_BLOCKS).close()  # which makes the folder ours
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = open_disk(tmp_path, namespace=OF_BLOCKS)
    assert find(source, [1, 2, 3], num_bytes=NUM_BYTES) == 2
    assert load(source, [2, 1], num_bytes=NUM_BYTES) == [True, True] and not source.state().rejected


def test_blocks_on_a_disk_are_written_as_before(tmp_path: Path) -> None:
    source = open_disk(tmp_path, namespace=OF_BLOCKS)
    assert source.store([*filled([1], 7, NUM_BYTES), *filled([2], 0, NUM_BYTES)]) == [True, True]
    assert {str(path.relative_to(tmp_path)): path.read_bytes() for path in files_of(tmp_path)} == FILES


@pytest.mark.parametrize("secret", VALUES)
def test_blocks_that_left_the_machine_are_read_and_written_as_before(secret: bytes) -> None:
    form, value = SealedFormat(OF_BLOCKS._replace(secret=secret)), VALUES[secret]
    head, payload, tail = value[:HEADER_BYTES], value[HEADER_BYTES:][:NUM_BYTES], value[HEADER_BYTES + NUM_BYTES :]
    assert payload == content_of(key_of(3), NUM_BYTES) and len(value) == form.num_bytes(NUM_BYTES)
    assert form.find_defect(key_of(3), head, payload, tail) is None
    assert form.seal(key_of(3), payload) == (head, tail)


def test_the_root_of_all_keys_is_that_of_before() -> None:
    roots = [new_namespace(bytes(32), b'{"format":1}', secret).hex() for secret in (b"", SECRET)]
    assert roots == [
        "42edfd797b2ac3269fa464b1387a9ad72edc1de6605e6793fa70b10388ff784f",
        "e2ea85a34dd4e130e347f7b064baf2ecc2224b6c6b6a5e1e27764d3b05cd05a6",
    ]
