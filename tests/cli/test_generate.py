"""`tandem generate` against a stand-in gateway on loopback."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import grpc
import pytest

from tandem.cli import main
from tandem.v1 import drafter_pb2, gateway_pb2, sampling_pb2
from tests.cli.pseudo_terminal import pseudo_terminal
from tests.client.stand_in_gateway import StandInGateway, refusal

pytestmark = pytest.mark.stand_in


async def generate(gateway: StandInGateway, *options: str) -> int:
    return await asyncio.to_thread(main, ["generate", "--target", gateway.address, *options])


async def test_json_is_one_object_with_every_usage_field(
    gateway: StandInGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await generate(gateway, "ren", "--json") == 0
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "token_ids": [7, 8, 9, 10],
        "text": "néw\nname",
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 4,
            "output_tokens": 4,
            "cached_tokens": 0,
            "num_steps": 2,
            "num_drafts": 1,
            "num_draft_tokens": 3,
            "num_accepted_tokens": 2,
            "accepted_per_position": [1, 1, 0],
            "resumes": 0,
            "by_match_length": [
                {
                    "matched_ngram_length": 2,
                    "num_drafts": 1,
                    "num_draft_tokens": 3,
                    "num_accepted_tokens": 2,
                }
            ],
            "num_sequence_drafts": 1,
            "num_pool_drafts": 0,
            "undrafted": None,
            # Derived from the fields above.
            "num_steps_without_drafts": 1,
            "acceptance_rate": 2 / 3,
            "mean_acceptance_length": 3,
            "max_acceptance_length": 3,
            "acceptance_per_position": [1, 1, 0],
        },
    }
    assert set(json.loads(line)["usage"]) >= {
        field.name for field in gateway_pb2.Usage.DESCRIPTOR.fields
    }


async def test_a_trace_is_shown_step_by_step_with_the_output_and_a_summary(
    gateway: StandInGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script[1:1] = [traced(step_id=1), traced(step_id=2)]
    assert await generate(gateway, "--token-ids", "5,6,7,8", "--trace") == 0
    assert gateway.requests[0].trace
    shown = capsys.readouterr().out
    assert "step 1: 0 tokens computed, 2 scheduled\n" in shown
    assert "step 2: " in shown
    assert "9: for 2 tokens, they followed 6 in the pool\n" in shown
    assert shown.index("step 2: ") < shown.index("\nnéw\nname\n") < shown.index("requests")
    assert "maximum acceptance length  3" in shown


async def test_a_models_text_steers_no_terminal_in_any_form(gateway: StandInGateway) -> None:
    gateway.script[1].chunk.text = "é\x1b]0;b\x07\x9b"
    escaped = r"é\x1b]0;b\x07\x9b"
    assert escaped in await generate_in_terminal(gateway, "ren", "--trace")
    shown = await generate_in_terminal(gateway, "ren", "--json")
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "é" in shown
    assert json.loads(shown)["text"].startswith(gateway.script[1].chunk.text)


def traced(step_id: int) -> gateway_pb2.GenerateResponse:
    step = sampling_pb2.StepTrace(
        step_id=step_id,
        num_scheduled_tokens=2,
        input_token_ids=[5, 6],
        positions=[0, 1],
        slot_mapping=[16, 17],
        context_length_after=4,
        proposals=[
            sampling_pb2.ProposalTrace(
                base_length=2,
                token_ids=[9],
                matched_ngram_length=1,
                source=drafter_pb2.SOURCE_POOL,
            )
        ],
    )
    return gateway_pb2.GenerateResponse(traced=gateway_pb2.Traced(step=step))


async def test_flags_reach_the_request(gateway: StandInGateway) -> None:
    status = await generate(
        gateway,
        *("--token-ids", "1,2,3", "--max-new-tokens", "5", "--temperature", "0.5"),
        *("--seed", "11", "--no-speculation", "--num-speculative-tokens", "4"),
        *("--prompt-lookup-min", "1", "--prompt-lookup-max", "6", "--model-id", "demo"),
        *("--preset", "vllm-kmp", "--pool", "team"),
    )
    assert status == 0
    assert gateway.requests == [
        gateway_pb2.GenerateRequest(
            tokens=gateway_pb2.TokenIds(token_ids=[1, 2, 3]),
            model_id="demo",
            max_new_tokens=5,
            sampling=sampling_pb2.SamplingParams(temperature=0.5, seed=11),
            speculation=sampling_pb2.SpeculationParams(
                enabled=False,
                num_speculative_tokens=4,
                prompt_lookup_min=1,
                prompt_lookup_max=6,
                preset=sampling_pb2.PRESET_VLLM_KMP,
                pool="team",
            ),
        )
    ]


@pytest.mark.parametrize("flag", ["--num-beams", "--tree-width", "--lora", "--adapter", "--image"])
async def test_what_is_out_of_scope_is_refused_by_name(
    gateway: StandInGateway, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        await generate(gateway, "ren", flag, "4")
    assert f"{flag}: Tandem does not do" in capsys.readouterr().err
    assert gateway.requests == []


async def test_a_refusal_is_one_line_naming_the_field_and_exit_code_1(
    gateway: StandInGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script = []
    gateway.failure = refusal(
        grpc.StatusCode.INVALID_ARGUMENT, "must be in (0, 1],\nnot 2.0", field="sampling.top_p"
    )
    assert await generate(gateway, "ren", "--temperature", "2") == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        "tandem generate: sampling.top_p: must be in (0, 1], not 2.0 (INVALID_ARGUMENT)\n"
    )


async def test_an_absent_gateway_is_one_line(
    unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--target", f"127.0.0.1:{unused_tcp_port}", "ren"]
    assert await asyncio.to_thread(main, arguments) == 1
    [line] = capsys.readouterr().err.splitlines()
    address = f"127.0.0.1:{unused_tcp_port}"
    assert line == (
        f"tandem generate: {address}: Failed to connect to remote host: Connection refused "
        "(UNAVAILABLE); check the address, that it runs, and what it asks of --tls, --tls-ca, "
        f"--tls-cert; tandem doctor --target {address} says more"
    )


async def test_a_token_comes_from_a_file_or_the_environment(
    gateway: StandInGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert await generate(gateway, "ren") == 0
    monkeypatch.setenv("TANDEM_TOKEN", "from-environment")
    assert await generate(gateway, "ren") == 0
    assert await generate(gateway, "ren", "--token-file", str(file)) == 0
    assert [each.get("authorization") for each in gateway.metadata] == [
        None,
        "Bearer from-environment",
        "Bearer from-file",
    ]


@pytest.mark.parametrize("flag", ["--token-file", "--tls-ca", "--tls-cert", "--tls-key"])
def test_a_file_that_cannot_be_read_is_one_line_that_names_the_flag(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["generate", "ren"], ["bench"]):
        with pytest.raises(SystemExit) as caught:
            main([*command, flag, "/nonexistent/file"])
        assert caught.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"{flag}: /nonexistent/file: No such file or directory" in line


async def test_ctrl_c_ends_the_call_and_exits_with_130(gateway: StandInGateway) -> None:
    gateway.hang = True
    process = await started(gateway, "ren")
    assert process.stdout is not None
    # The last text before the stand-in hangs; the command writes the line's end itself.
    assert await process.stdout.readexactly(len("néw\nname".encode())) == "néw\nname".encode()
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
    assert process.stderr is not None
    assert await process.stderr.read() == b""
    await gateway.cancelled.wait()


async def test_a_closed_stdout_ends_the_call_without_an_error(
    gateway: StandInGateway,
) -> None:
    gateway.script[1:-1] = [
        gateway_pb2.GenerateResponse(
            chunk=gateway_pb2.Chunk(offset=offset, token_ids=[1], text="x" * 100)
        )
        for offset in range(5_000)
    ]
    gateway.hang = True
    process = await started(gateway, "ren")
    assert process.stdout is not None
    assert process.stderr is not None
    await process.stdout.readexactly(1)
    process.stdout._transport.close()  # type: ignore[attr-defined]
    assert await process.stderr.read() == b""
    assert await process.wait() == 0
    await gateway.cancelled.wait()


async def started(
    gateway: StandInGateway, *options: str, **environ: str
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem", "generate", "--target", gateway.address, *options),
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def generate_in_terminal(gateway: StandInGateway, *options: str, **environ: str) -> str:
    """What a process shows in a terminal."""
    with pseudo_terminal() as terminal:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tandem", "generate", "--target", gateway.address),
            *options,
            stdout=terminal.descriptor,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "", **environ},
        )
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    return terminal.shown.replace("\r\n", "\n")


REPORTED = [("w\n", True), ("", True), ("na\x1bme", False)]


@pytest.mark.parametrize(
    ("flags", "environ", "shown"),
    [
        (["--show-drafts"], {}, "né\x1b[1;32mw\n\x1b[0mna\\x1bme\n"),
        (["--show-drafts"], {"NO_COLOR": "1"}, "néw\nna\\x1bme\n"),
    ],
    ids=["colours", "no colour"],
)
async def test_accepted_drafts_have_a_colour_token_by_token(
    gateway: StandInGateway, flags: list[str], environ: dict[str, str], shown: str
) -> None:
    """The stand-in reports tokens to whoever asks for it, as gateways do."""
    for response, tokens in zip(gateway.script[1:3], [[("né", False)], REPORTED], strict=True):
        response.chunk.text = "".join(text for text, _ in tokens)
        if flags and not environ:
            for text, accepted in tokens:
                response.chunk.reported_tokens.add(text=text, accepted=accepted)
    assert await generate_in_terminal(gateway, "ren", *flags, **environ) == shown
    assert gateway.requests[0].report_tokens is ("1b[1" in repr(shown))


@pytest.mark.parametrize(
    ("flags", "environ", "shown"),
    [
        (["--show-drafts"], {}, "né\x1b[1;32mw\nname\x1b[0m\n"),
        ([], {}, "néw\nname\n"),
        (["--show-drafts"], {"NO_COLOR": "1"}, "néw\nname\n"),
    ],
    ids=["colours", "no flag", "no colour"],
)
async def test_after_token_ids_the_steps_that_accepted_drafts_have_a_colour(
    gateway: StandInGateway, flags: list[str], environ: dict[str, str], shown: str
) -> None:
    """A server without a tokenizer refuses to report tokens."""
    assert await generate_in_terminal(gateway, "--token-ids", "5,6", *flags, **environ) == shown
    assert not gateway.requests[0].report_tokens
