"""The log, /health and the Ready line name the kernels, and the log warns about plain torch."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tokenloom import LLM, Client, SamplingParams
from tokenloom.frontend.cli.running.status import lines
from tokenloom.ipc.errors import ConfigError
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.system.http_engine import samples

pytestmark = pytest.mark.skipif(not instruction_levels(), reason="the processor has no AVX2")

REASON = "there is no C compiler (cc, gcc): install one, or tokenloom from a wheel with kernels"


@pytest.mark.parametrize("has_compiler", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_log_health_and_ready_line_name_the_kernels(tmp_path: Path, has_compiler: bool) -> None:
    slim = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}  # of an image without a compile cache
    arguments = ["--device", "cpu", "--num-threads", "1", "--http", "0"]
    with Engine(tmp_path, arguments, {} if has_compiler else slim) as engine:
        engine.wait_ready()
        with Client(engine.address) as client:
            health, info = client.health(), client.info()
        with httpx2.Client(base_url=engine.url) as http:
            found, named = samples(http), http.get("/health").json()["kernels"]
    expected = f"C kernels, {instruction_levels()[0]}, compiled here" if has_compiler else f"plain torch: {REASON}"
    assert info.kernels == named == expected
    assert f"kernels    {expected}" in lines(health, info)
    assert found[f"tokenloom_kernels_info{{{expected}}}"] == 1
    assert any("load weights" in line and expected in line for line in engine.lines)
    warned = [line for line in engine.errors.read_text(encoding="utf-8").splitlines() if " WARNING " in line]
    assert [line for line in warned if REASON in line] == ([] if has_compiler else warned[-1:])


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"in_process": True}, {"tensor_parallel_size": 2}], ids=repr)
def test_products_of_integers_are_named_and_answer(options: dict[str, object]) -> None:
    with LLM(num_threads=1, device="cpu", quantization="int4", **options) as llm:  # type: ignore[arg-type]
        assert llm.info().kernels.endswith(", integer products")
        greedy = SamplingParams(temperature=0, max_tokens=8)
        (output,) = llm.generate("The capital of France is", greedy, use_tqdm=False)
        assert "Paris" in output.outputs[0].text


def test_cpu_isa_forces_a_lower_level() -> None:
    lowest = instruction_levels()[-1]
    with LLM(num_threads=1, in_process=True, cpu_isa=lowest.lower().replace("-", "")) as llm:
        assert lowest in llm.info().kernels
        assert llm.generate("The")[0].outputs[0].token_ids


@pytest.mark.skipif("AMX" in instruction_levels(), reason="the processor has every level")
def test_a_level_that_the_processor_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match=r"cpu_isa: this processor has no amx, but: .*avx2"):
        LLM(num_threads=1, in_process=True, cpu_isa="amx")
