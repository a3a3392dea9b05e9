"""Files, options, links and public names in the documents exist."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import tokenloom
from tokenloom.frontend.checkpoint.hub import is_model_name
from tokenloom.frontend.cli.command import COMMANDS, load_command
from tokenloom.frontend.forms.openai.schema import ChatRequest
from tokenloom.frontend.launcher.options.arguments import add_engine_arguments
from tokenloom.ipc.spec.config.engine_config import EngineConfig

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.name != "gpu.md"),
)
EXAMPLES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/learn/examples").glob("*.py"))
ROOMS = ("core", "frontend", "ipc", "kernels", "workers", "tests", "scripts", "docs", "demo")
OTHERS_FLAGS = {"--nightly", "--config", "--help", "--index-url"}  # of scripts/test, of every command, of pip


@pytest.fixture(params=DOCUMENTS)
def text(request: pytest.FixtureRequest) -> str:
    return (ROOT / request.param).read_text()


def test_every_path_exists(text: str) -> None:
    paths = re.findall(rf"(?<![\w/.])(?:{'|'.join(ROOMS)})/[\w/.*…-]*[\w*…]", text)
    patterns = {path for path in paths if re.search(r"[*…]", path)}
    assert [path for path in set(paths) - patterns if not (ROOT / path).exists()] == []


def test_every_link_has_a_target(text: str, request: pytest.FixtureRequest) -> None:
    folder = (ROOT / request.node.callspec.params["text"]).parent
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if not (folder / link).exists()] == []


def test_every_documented_option_exists() -> None:
    known = known_flags()
    pages = ("operate/operations", "operate/gateway", "learn/quickstart", "learn/lora", "learn/images", "learn/audio")
    for name in (f"docs/{page}.md" for page in (*pages, "design/processes", "design/request", "design/failures")):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / name).read_text()))
        assert named <= known, f"{name}: {named - known}"


def known_flags() -> set[str]:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    parsers = [parser]
    for name in COMMANDS:
        parsers.append(argparse.ArgumentParser())
        load_command(name).configure(parsers[-1])
    return {flag for each in parsers for action in each._actions for flag in action.option_strings} | OTHERS_FLAGS


RAY_FLAGS = {"--head", "--node-ip-address", "--port", "--autoscaling-config", "--address"}  # of `ray start`


@pytest.mark.parametrize(
    "name", ["tokenloom.service", "kubernetes.yaml", "inference-pool.yaml", "kuberay.yaml", "ray-cluster.yaml"]
)
def test_the_systemd_unit_and_the_manifests_use_existing_options(name: str) -> None:
    text = (ROOT / "docs/operate/deploy" / name).read_text()
    flags = set(re.findall(r"(?<![\w-])--(?!from-literal|from-file)[a-z][a-z-]+", text))
    assert flags <= known_flags() | (RAY_FLAGS if name == "ray-cluster.yaml" else set())
    assert all(yaml.safe_load_all(text)) if name.endswith("yaml") else True


@pytest.mark.parametrize("name", ["kuberay.yaml", "ray-cluster.yaml"])
def test_the_ray_clusters_have_the_version_of_the_pins(name: str) -> None:
    text = (ROOT / "docs/operate/deploy" / name).read_text()
    (pin,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"2\.\d\d\.\d", text)) == {pin}


def test_the_systemd_unit_allows_time_to_drain_and_only_writable_folders() -> None:
    lines = [line for line in (ROOT / "docs/operate/deploy/tokenloom.service").read_text().splitlines() if "=" in line]
    settings = [(name, value) for name, _, value in (line.partition("=") for line in lines)]
    unit = dict(settings)
    assert int(unit["TimeoutStopSec"]) > EngineConfig().drain_timeout_s
    assert int(unit["TimeoutStartSec"]) > EngineConfig().start_timeout_s
    assert unit["Type"] == "notify" and unit["RestartPreventExitStatus"] == "2"
    environment = dict(value.split("=", 1) for name, value in settings if name == "Environment")
    assert environment.pop("XDG_RUNTIME_DIR") == f"/run/{unit['RuntimeDirectory']}"
    caches = {"XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "HOME"}
    assert environment.keys() == caches
    assert all(path.startswith(f"/var/cache/{unit['CacheDirectory']}") for path in environment.values())


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit_and_rates_its_exposure_low(tmp_path: Path) -> None:
    unit = tmp_path / "tokenloom.service"
    text = (ROOT / "docs/operate/deploy/tokenloom.service").read_text()
    unit.write_text(text.replace("/opt/tokenloom/.venv/bin/engine-launch", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (verified.returncode, verified.stderr) == (0, "")
    rate = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=40", unit]
    rated = subprocess.run(rate, capture_output=True, text=True, timeout=60)
    assert rated.returncode == 0, rated.stdout[-400:]


def test_the_manifest_probes_existing_paths_and_allows_time_to_drain() -> None:
    documents = list(yaml.safe_load_all((ROOT / "docs/operate/deploy/kubernetes.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    assert by_kind.keys() == {"PersistentVolumeClaim", "Service", "Deployment"}
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    served = set(re.findall(r'Endpoint\("(/\w+)"', (ROOT / "frontend/server/http/admin.py").read_text()))
    probes = {name: value["httpGet"]["path"] for name, value in container.items() if name.endswith("Probe")}
    assert probes.keys() == {"startupProbe", "readinessProbe", "livenessProbe"} and set(probes.values()) <= served
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > EngineConfig().start_timeout_s
    before_stop_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = float(container["command"][container["command"].index("--drain-timeout-s") + 1])
    assert pod["terminationGracePeriodSeconds"] >= before_stop_s + drain_s + 5  # 5 s for the stop itself
    claims = {each["metadata"]["name"] for each in documents if each["kind"] == "PersistentVolumeClaim"}
    volumes = {each["name"]: each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]}
    assert claims == set(filter(None, volumes.values()))
    assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys() and "memory" in container["resources"][
        "limits"
    ]
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]


def test_documented_benchmark_options_exist() -> None:
    text = (ROOT / "docs/reference/benchmarks.md").read_text()
    common = (ROOT / "scripts/bench/runner.py").read_text()
    for name, rest in re.findall(r"`(?:engine-launch )?bench (\w+)([^`]*)`", text):
        source = common + (ROOT / f"scripts/bench/cases/{name}.py").read_text()
        assert all(f'"{flag}"' in source for flag in re.findall(r"--[a-z-]+", rest)), (name, rest)


@pytest.mark.parametrize("name", ["README.md", "docs/learn/quickstart.md", *EXAMPLES])
def test_example_programs_import_only_public_names(name: str) -> None:
    lines = re.findall(r"from tokenloom import (.+)", (ROOT / name).read_text())
    assert {name.strip() for line in lines for name in line.split(",")} <= set(tokenloom.__all__)


@pytest.mark.parametrize("name", ["README.md", "docs/learn/quickstart.md", "docs/operate/install.md"])
def test_the_commands_for_a_cpu_install_the_pinned_torch_before_the_engine(name: str) -> None:
    text = (ROOT / name).read_text()
    (pin,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    first = text.index(f"pip install torch=={pin} --index-url https://download.pytorch.org/whl/cpu")
    assert set(re.findall(r"torch==([\d.]+)", text)) == {pin}
    assert "pip install -c constraints.txt ." in text[first:], "before it, CUDA would come with the engine"


def test_the_first_screen_has_the_oldest_python_a_gguf_file_and_a_model_of_the_hub() -> None:
    screen = (ROOT / "README.md").read_text().partition("## How it works")[0]
    project = (ROOT / "pyproject.toml").read_text()
    versions = re.findall(r"Python :: (3\.\d+)\"", project)
    assert f"Python {versions[0]} to {versions[-1]}" in screen and f'">={versions[0]}"' in project
    served = re.findall(r"^engine-launch serve (\S+)", screen, re.MULTILINE)
    assert [name.endswith(".gguf") for name in served] == [True, False] and is_model_name(served[1])


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


PLAIN = ["README.md", *(name for name in DOCUMENTS if name.startswith(("docs/learn/", "docs/operate/")))]
NO_PROSE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|^(?:\||#|!\[| {4}).*?$", re.MULTILINE | re.DOTALL)
NAMES = re.compile(r"`[^`]+`(?:(?:,| and| or)* `[^`]+`)*")
MAX_WORDS = 25


def sentence_lengths(text: str) -> list[int]:
    """Return the words of each sentence of a page's paragraphs and list items, ascending.

    A list of names in code counts as one word. Code blocks, tables, headings and pictures are left out.
    """
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", NO_PROSE.sub("\n", text))
    paragraphs = re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", text, flags=re.MULTILINE)
    ends = re.compile(r"(?<=[.!?])[*_)”]*\s+(?=[A-Z0-9`*(“])")
    sentences = [
        each for paragraph in paragraphs for each in ends.split(NAMES.sub("`name`", " ".join(paragraph.split())))
    ]
    counts = [len(re.findall(r"\S*\w\S*", each)) for each in sentences]
    return sorted(count for count in counts if count)


def test_the_words_of_a_sentence_are_counted() -> None:
    assert sentence_lengths("# One\n\nOne [two](a.md)\nthree. Four `f g`, `h`.\n- Five.\n\n| six seven |\n") == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("name", PLAIN)
def test_nine_sentences_of_ten_have_at_most_25_words(name: str) -> None:
    lengths = sentence_lengths((ROOT / name).read_text(encoding="utf-8"))
    assert lengths[len(lengths) * 9 // 10] <= MAX_WORDS


def test_every_test_of_a_public_report_exists_and_no_report_is_there_twice() -> None:
    lines = (ROOT / "docs/reference/public-reports.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    reports = [row[0] for row in rows if len(row) == 3 and row[0] != "report"]
    assert len(reports) == len(set(reports)) >= 70
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in reports)
    for *_, law, cell in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)
        assert named or law == "law", f"{law}: no test"
        for path, name in named:
            found = re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
            assert found, f"{path}::{name}"


def test_every_finding_of_the_first_contact_is_there_with_tests_that_exist() -> None:
    lines = (ROOT / "docs/reference/first-contact.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 32)) and {len(row) for row in rows} == {4}
    for number, _, now, cell in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)
        assert named or (cell == "–" and "Open" in now), f"{number}: no test"
        for path, name in named:
            found = re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
            assert found, f"{number}: {path}::{name}"


def test_the_quick_start_says_how_answers_end_and_thoughts_are_left_out() -> None:
    text = (ROOT / "docs/learn/quickstart.md").read_text()
    assert '"chat_template_kwargs": {"enable_thinking": false}' in text
    (flag,) = set(re.findall(r"(--default-max-tokens) \d+", text))
    assert flag in known_flags() and "chat_template_kwargs" in ChatRequest.__struct_fields__


def test_every_report_that_a_test_names_is_in_the_list() -> None:
    listed = set(re.findall(r"^\| (\S+#\d+) \|", (ROOT / "docs/reference/public-reports.md").read_text(), re.MULTILINE))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        named = set(re.findall(r"\b[\w-]+/[\w.-]+#\d+", path.read_text()))
        assert named <= listed, f"{path}: {named - listed}"
