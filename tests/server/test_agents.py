"""Agent loops: the tool runners of the official clients, and command line agents, against a scripted checkpoint.
MINITUI_AGENTS=DIRECTORY also runs the agents that are installed there: npm install --prefix DIRECTORY @openai/codex
@anthropic-ai/claude-code opencode-ai @qwen-code/qwen-code"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import agents
import anthropic
import openai
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from minitui.prefix.diagnose import diagnose
from minitui.prefix.session import read_log
from tests.support.paths import QWEN3
from tests.support.server.serving import Running, serving, through_proxy

pytestmark = pytest.mark.skipif(not (QWEN3 / "tokenizer.json").is_file(), reason="../shared/qwen3 is not there")

CITY, SENTENCE = "Paris", "It is 17 degrees in Paris."
QUESTION = "How warm is it in Paris?"

HEAD, THETA = 32, 100.0
CONSTANT, MARKER, RESULT, SEEN, CODE, FOUND = 0, 1, 2, 3, slice(4, 12), 12  # the parts of a hidden state
LARGE = 64.0  # the constant: beside it the rest does not change the norm, so normalising divides by LARGE / unit


def scripted(directory: Path, name: str, arguments: dict[str, Any], sentence: str) -> Path:
    """Write a checkpoint in Qwen3's format, with its tokenizer and template, that calls one tool, and says one sentence
    once the conversation has a tool's result. Return its directory.

    It has one layer. Attention head i looks i + 1 tokens back. So the nearest marker ("assistant", or "</think>"
    without thinking; both are the last token but one of a prompt) says how many tokens of the reply exist. The last
    head has a zero query: it averages over all tokens, and is above 0 if one is "</tool_response>". Each neuron writes
    one token.
    """
    tokenizer = Tokenizer.from_file(str(QWEN3 / "tokenizer.json"))
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    replies = [tokenizer.encode(text + "<|im_end|>").ids for text in (call, sentence)]
    script = [(token, step, seen) for seen, reply in enumerate(replies) for step, token in enumerate(reply)]
    steps = max(map(len, replies))
    heads, width, neurons = steps + 1, FOUND + steps, len(script)
    unit = width**0.5
    config = json.loads((QWEN3 / "configs" / "Qwen3-0.6B.json").read_text()) | {
        "num_hidden_layers": 1, "hidden_size": width, "intermediate_size": neurons, "num_attention_heads": heads,
        "num_key_value_heads": 1, "head_dim": HEAD, "rope_theta": THETA, "torch_dtype": "float32",
    }

    embedding = torch.zeros(config["vocab_size"], width)
    embedding[:, CONSTANT] = LARGE
    embedding[[tokenizer.token_to_id("assistant"), tokenizer.token_to_id("</think>")], MARKER] = 1
    embedding[tokenizer.token_to_id("</tool_response>"), RESULT] = 1
    for number, token in enumerate(sorted({token for token, _, _ in script})):
        embedding[token, CODE] = torch.tensor([float((number >> bit & 1) * 2 - 1) for bit in range(8)])

    q, k, v = torch.zeros(heads * HEAD, width), torch.zeros(HEAD, width), torch.zeros(HEAD, width)
    o, gate, up = torch.zeros(width, heads * HEAD), torch.zeros(neurons, width), torch.zeros(neurons, width)
    down = torch.zeros(width, neurons)
    k[:, CONSTANT] = 1
    v[0, MARKER] = v[1, RESULT] = LARGE / unit
    for step in range(steps):  # the key of `step + 1` tokens back is the query, turned back by as many positions
        angles = (step + 1) * THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))
        turned = torch.cat([angles.cos() + angles.sin(), angles.cos() - angles.sin()])
        q[step * HEAD : (step + 1) * HEAD, CONSTANT] = turned
        o[FOUND + step, step * HEAD] = 1
    o[SEEN, steps * HEAD + 1] = 1
    for neuron, (token, step, seen) in enumerate(script):  # on if the nearest marker is `step + 1` tokens back
        gate[neuron, FOUND : FOUND + step], gate[neuron, FOUND + step], gate[neuron, CONSTANT] = -2, 1, -0.5 / LARGE
        up[neuron, SEEN if seen else CONSTANT] = 1e8 if seen else 1  # one token of 40,960 outweighs the call
        down[CODE, neuron] = embedding[token, CODE]
    last = torch.zeros(width)
    last[CODE] = 100
    layer = {
        "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": o,
        "self_attn.q_norm": torch.full((HEAD,), 10.0), "self_attn.k_norm": torch.full((HEAD,), 10.0),
        "mlp.gate_proj": gate * 100 * LARGE / unit, "mlp.up_proj": up, "mlp.down_proj": down,
        "input_layernorm": torch.ones(width), "post_attention_layernorm": torch.ones(width),
    }
    tensors = {f"model.layers.0.{part}.weight": tensor for part, tensor in layer.items()}
    tensors |= {"model.embed_tokens.weight": embedding, "model.norm.weight": last}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / file).symlink_to(QWEN3 / file)
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = tmp_path_factory.mktemp("agents")
    model = str(scripted(place, "get_temperature", {"city": CITY}, SENTENCE))
    with serving(place, {"model": model}, served_names=("scripted",)) as running:
        yield running


@pytest.fixture
def url(server: Running, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of the server; for streamed answers, of a proxy before it, whose log then says what is shared."""
    if not request.getfixturevalue("stream"):
        yield server.url
        return
    with through_proxy(server, tmp_path / "log") as address:
        yield address
    first, second = diagnose(read_log(tmp_path / "log"))
    assert (first.cause, second.cause) == ("first", "none")
    assert second.ancestor == first.number and second.could > 0.5 * first.prompt


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents_calls_the_tool_and_answers(url: str, api: str, stream: bool) -> None:
    asked: list[str] = []

    @agents.function_tool
    def get_temperature(city: str) -> str:
        """How warm it is in a city."""
        asked.append(city)
        return "17"

    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        model = kind(model="scripted", openai_client=client)
        agent = agents.Agent(name="Weather", instructions="Help.", tools=[get_temperature], model=model)
        config = agents.RunConfig(tracing_disabled=True)
        if stream:
            result = agents.Runner.run_streamed(agent, QUESTION, run_config=config)
            assert "raw_response_event" in [event.type async for event in result.stream_events()]
        else:
            result = await agents.Runner.run(agent, QUESTION, run_config=config)
    assert (asked, result.final_output) == ([CITY], SENTENCE)
    assert [type(item).__name__ for item in result.new_items] == [
        "ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_anthropics_tool_runner_calls_the_tool_and_answers(url: str, stream: bool) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_temperature(city: str) -> str:
        """How warm it is in a city."""
        asked.append(city)
        return "17"

    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="scripted", max_tokens=100, tools=[get_temperature], stream=stream,
            messages=[{"role": "user", "content": QUESTION}],
        )
        replies = [message.get_final_message() if stream else message for message in runner]
    assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
    assert (asked, replies[-1].content[0].text) == ([CITY], SENTENCE)
    read = [reply.usage.input_tokens + reply.usage.cache_read_input_tokens for reply in replies]
    assert read[1] > read[0] + replies[0].usage.output_tokens, "the second prompt lacks the question or the call"


# ---- command line agents

BIN = Path(os.environ.get("MINITUI_AGENTS") or "none").absolute() / "node_modules" / ".bin"


class Agent(NamedTuple):
    """A program that is installed in MINITUI_AGENTS, and its tool that runs a command."""

    tool: str
    arguments: dict[str, Any]
    command: list[str]
    variables: dict[str, str]  # SERVER stands for the server's address
    files: dict[str, str]  # below the home directory


ASKED, COPY = "Copy note.txt to copy.txt.", "cp note.txt copy.txt"
AGENTS = {
    "codex": Agent(
        "exec_command", {"cmd": COPY}, ["exec", "--skip-git-repo-check", "-s", "danger-full-access", ASKED], {},
        {".codex/config.toml": (
            'model = "scripted"\nmodel_provider = "minitui"\n\n[model_providers.minitui]\nname = "minitui"\n'
            'base_url = "SERVER/v1"\nwire_api = "responses"\n'
        )},
    ),
    "claude": Agent(
        "Bash", {"command": COPY, "description": "Copy"}, ["-p", ASKED, "--allowedTools", "Bash"],
        {"ANTHROPIC_BASE_URL": "SERVER", "ANTHROPIC_API_KEY": "any", "ANTHROPIC_MODEL": "scripted",
         "ANTHROPIC_SMALL_FAST_MODEL": "scripted", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}, {},
    ),
    "opencode": Agent(
        "bash", {"command": COPY, "description": "Copy"}, ["run", ASKED], {},
        {".config/opencode/opencode.json": json.dumps({
            "model": "minitui/scripted",
            "provider": {"minitui": {
                "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "SERVER/v1"}, "models": {"scripted": {}},
            }},
        })},
    ),
    "qwen": Agent(
        "run_shell_command", {"command": COPY, "is_background": False}, ["--auth-type", "openai", "-y", ASKED],
        {"OPENAI_BASE_URL": "SERVER/v1", "OPENAI_API_KEY": "any", "OPENAI_MODEL": "scripted"}, {},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", AGENTS)
def test_a_command_line_agent_runs_its_tool_and_ends(tmp_path: Path, name: str) -> None:
    if not (BIN / name).exists():
        pytest.skip(f"MINITUI_AGENTS names no directory with {name}")
    agent = AGENTS[name]
    model, home, work = (tmp_path / part for part in ("model", "home", "work"))
    for directory in (model, home, work):
        directory.mkdir()
    (work / "note.txt").write_text("17")
    scripted(model, agent.tool, agent.arguments, SENTENCE)
    with serving(tmp_path, {"model": str(model), "num_blocks": 4096}, served_names=("scripted",)) as running, \
            through_proxy(running, tmp_path / "log") as url:
        for path, text in agent.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text.replace("SERVER", url))
        variables = {key: value.replace("SERVER", url) for key, value in agent.variables.items()}
        ran = subprocess.run(
            [BIN / name, *agent.command], cwd=work, env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500,
        )
    assert ran.returncode == 0, ran.stderr
    assert (work / "copy.txt").read_text() == "17" and SENTENCE in ran.stdout, ran.stdout
    assert len(read_log(tmp_path / "log")) >= 2
