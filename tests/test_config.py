"""Where a configuration's values come from, and which are refused."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest

from turnout import config as config_module
from turnout.config import Config, ServerConfig, load
from turnout.errors import UserError
from turnout.flags import field_type, flag_name


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for field in dataclasses.fields(ServerConfig):
        monkeypatch.delenv(f"TURNOUT_{field.name.upper()}", raising=False)


def write(folder: Path, text: str) -> str:
    (folder / "turnout.yaml").write_text(text)
    return str(folder / "turnout.yaml")


def test_flag_before_variable_before_file_before_default(tmp_path, monkeypatch):
    file = write(tmp_path, "page-size: 4\nmax_running_requests: 5\ncontext-length: 6\n")
    monkeypatch.setenv("TURNOUT_PAGE_SIZE", "7")
    monkeypatch.setenv("TURNOUT_MAX_RUNNING_REQUESTS", "8")
    config = load(Config, {"page_size": 9, "max_running_requests": None}, config_file=file)
    assert config.page_size == 9  # flag
    assert config.max_running_requests == 8  # variable; a flag that was not given is None
    assert config.context_length == 6  # file
    assert config.mem_fraction_static == 0.85  # default


def test_a_false_flag_still_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNOUT_DISABLE_CUDA_GRAPH", "yes")
    assert load(Config, {}).disable_cuda_graph is True
    assert load(Config, {"disable_cuda_graph": False}).disable_cuda_graph is False


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("no", False), ("", False)]
)
def test_variables_that_are_true_or_false(text, value, monkeypatch):
    monkeypatch.setenv("TURNOUT_TRUST_REMOTE_CODE", text)
    assert load(Config, {}).trust_remote_code is value


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("TRUST_REMOTE_CODE", "perhaps", "true or false"),
        ("PAGE_SIZE", "16.5", "type int"),
        ("PAGE_SIZE", "", "type int"),
        ("MEM_FRACTION_STATIC", "most", "type float"),
    ],
)
def test_variables_that_are_refused(name, text, words, monkeypatch):
    monkeypatch.setenv(f"TURNOUT_{name}", text)
    with pytest.raises(UserError, match=f"TURNOUT_{name}='{text}'.*{words}"):
        load(Config, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("page_size: [1", "not valid YAML"),
        ("- page_size", "mapping"),
        ("", "mapping"),
        ("page_sise: 1", "page_sise: unknown; did you mean page_size?"),
        ("sidecar: 1", "sidecar: unknown; known: .*page_size"),
        ("tp: 2\ntensor-parallel-size: 2", "tensor-parallel-size gives --tp-size a second time"),
        ("page_size: many", "--page-size 'many'.*type int"),
        ("page_size: true", "--page-size True.*type int"),
        ("device: 3", "--device 3.*type str"),
    ],
)
def test_files_that_are_refused(text, words, tmp_path):
    with pytest.raises(UserError, match=words):
        load(Config, {}, config_file=write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent\.yaml: cannot be read \(No such file"):
        load(Config, {}, config_file=str(tmp_path / "absent.yaml"))
    with pytest.raises(UserError, match="cannot be read"):
        load(Config, {}, config_file=str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9")
    with pytest.raises(UserError, match=r"latin\.yaml"):
        load(Config, {}, config_file=str(tmp_path / "latin.yaml"))


def test_the_servers_keys_stand_in_its_file(tmp_path):
    config = load(ServerConfig, {}, config_file=write(tmp_path, "port: 80\nshutdown-timeout: 2\n"))
    assert (config.port, config.shutdown_timeout) == (80, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "tpu"}, "--device 'tpu': must be one of auto, cpu, cuda"),
        ({"page_size": 0}, "--page-size 0: must be between 1 and 1024"),
        ({"page_size": 1025}, "must be between 1 and 1024"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static 1.5: must be between 0.01 and 1"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static nan"),
        ({"tp_size": 0}, "--tp-size 0: must be between 1 and 4096"),
        ({"max_prefill_tokens": -1}, "--max-prefill-tokens -1: must be at least 0"),
        ({"ep_size": 2**61 - 1}, f"--ep-size {2**61 - 1}: must be between 1 and 4096"),
        ({"tp_size": "2"}, "--tp-size '2': must be of type int"),
        ({"tp_size": 2.0}, "--tp-size 2.0: must be of type int"),
        ({"max_prefill_tokens": 10**23}, f"--max-prefill-tokens {10**23}: must be at most {2**62}"),
        ({"num_threads": True}, "--num-threads True: must be of type int"),
        ({"load_progress": 1}, "--load-progress 1: must be of type bool"),
    ],
)
def test_values_that_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        Config(**fields)


def test_aliases_stand_for_their_flags_everywhere(tmp_path, monkeypatch):
    file = write(tmp_path, "max-model-len: 64\ntensor_parallel_size: 2\n")
    monkeypatch.setenv("TURNOUT_MAX_NUM_SEQS", "8")
    config = load(Config, {"data_parallel_size": 2}, config_file=file)
    assert (config.context_length, config.tp_size) == (64, 2)
    assert (config.max_running_requests, config.dp_size) == (8, 2)


def test_a_file_of_the_server_does_for_other_commands(tmp_path):
    file = write(tmp_path, "port: 80\npage-size: 4\n")
    assert load(ServerConfig, {}, config_file=file).port == 80
    assert load(Config, {}, config_file=file).page_size == 4


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("TURNOUT_MAX_RUNNING_REQUEST", "did you mean TURNOUT_MAX_RUNNING_REQUESTS?"),
        ("TURNOUT_CHUNKED_PREFIL_SIZE", "did you mean TURNOUT_CHUNKED_PREFILL_SIZE?"),
    ],
)
def test_a_misspelt_variable_is_refused(variable, words, monkeypatch):
    monkeypatch.setenv(variable, "8")
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        load(Config, {})


def test_variables_that_are_not_ours_are_passed_over(monkeypatch):
    """Those that Kubernetes sets for a Service named turnout, and those of other programs."""
    monkeypatch.setenv("TURNOUT_PORT", "tcp://10.0.0.7:30000")
    monkeypatch.setenv("TURNOUT_PORT_30000_TCP_PORT", "30000")
    monkeypatch.setenv("TURNOUT_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("TURNOUT_IMAGE", "registry/turnout:1")
    assert load(ServerConfig, {}) == ServerConfig()


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match="'page_sise': unknown; did you mean page_size"):
        load(Config, {"page_sise": 4})


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_outside_the_range(port):
    with pytest.raises(UserError, match="--port"):
        ServerConfig(port=port)


def test_limits_themselves_are_allowed():
    config = ServerConfig(port=65535, page_size=1024, mem_fraction_static=1, max_total_tokens=0)
    assert config.mem_fraction_static == 1


def test_a_key_is_never_shown():
    assert ServerConfig(api_key="secret").describe()["api_key"] == "***"
    assert ServerConfig().describe()["api_key"] == ""


@pytest.mark.parametrize("key", ["", "caf\u00e9", "two words", "line\n", "tab\t", "\u0665"])
def test_a_key_that_would_let_in_everybody_or_nobody_is_refused(key, tmp_path, monkeypatch):
    """Wherever it comes from; a key is never shown."""
    words = "empty" if not key else f"U\\+{ord(next(c for c in key if not '!' <= c <= '~')):04X}"
    with pytest.raises(UserError, match=f"--api-key.*{words}") as caught:
        load(ServerConfig, {"api_key": key})
    assert not key or key not in str(caught.value)
    with pytest.raises(UserError, match="--api-key"):
        load(ServerConfig, {}, config_file=write(tmp_path, f"api-key: {json.dumps(key)}\n"))
    monkeypatch.setenv("TURNOUT_API_KEY", key)
    with pytest.raises(UserError, match="--api-key"):
        load(ServerConfig, {})
    assert load(ServerConfig, {"api_key": "!~aZ09"}).api_key == "!~aZ09"


def test_every_field_has_help_and_a_default_of_its_type():
    for field in dataclasses.fields(ServerConfig):
        assert field.metadata["help"], field.name
        assert type(field.default) is field_type(field) or field.default is None, field.name
        assert flag_name(field.name).startswith("--")


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().page_size = 2  # type: ignore[misc]


def test_overlap_that_is_asked_for_and_against_is_refused():
    with pytest.raises(UserError, match="leave one out"):
        Config(overlap_schedule="on", disable_overlap_schedule=True)
    assert Config(overlap_schedule="off", disable_overlap_schedule=True).disable_overlap_schedule


def test_every_field_is_read_somewhere():
    """As an attribute of some configuration, or by its name, outside of the class that declares it."""
    package = Path(config_module.__file__).parent
    read = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    assert {field.name for field in dataclasses.fields(ServerConfig)} - read == set()
