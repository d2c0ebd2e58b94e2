"""`tandem doctor`: each fault is found, named, and comes with what to do."""

import datetime
import json
import platform
import re
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from tandem.cli import main
from tandem.cli.checks import machine_checks, target_checks
from tandem.cli.checks.check import Check, Status
from tandem.cli.up import BUNDLED_MODEL
from tandem.transport.channel import TlsOptions
from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from verifier.model.describe import describe

MIB, GIB = 1 << 20, 1 << 30
CPU_SUPPORT = [
    {"field": "quantization", "value": "fp8", "refusal": None},
    {"field": "attention_backend", "value": "flash_attn", "refusal": "runs on GPUs only"},
]


def by_name(checks: Iterator[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_sound_machine_passes_and_the_bundled_model_is_understood(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    checks = {each["name"]: each for each in found["checks"]}
    assert checks["config.json"]["status"] == "ok"
    assert "GiB of weights" in checks["memory"]["found"]
    # Nobody named a gateway: one that is absent is no failure.
    assert checks["gateway 127.0.0.1:50050"]["status"] in ("ok", "warn")


def test_each_fault_is_a_line_with_advice_and_the_exit_code_is_1(
    tmp_path: Path, unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        status = main(
            [
                *("doctor", "--model", str(tmp_path), "--port", str(busy.getsockname()[1])),
                *("--target", f"127.0.0.1:{unused_tcp_port}"),
            ]
        )
    assert status == 1
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[1].rstrip(":"): line for line in lines}
    assert "\x1b" not in "".join(lines)
    assert found["port"].startswith("warn port: ")
    assert "tandem up --port" in found["port"]
    assert found["config.json"].startswith("fail config.json: ")
    assert found["tokenizer.json"].startswith("fail tokenizer.json: ")
    assert found["weights"].startswith("fail weights: ")
    assert found["gateway"].startswith(f"fail gateway 127.0.0.1:{unused_tcp_port}: ")


def test_a_checkpoint_that_is_not_sound_fails_and_a_strange_family_goes_to_transformers(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    checks = by_name(machine_checks.described(describe(folder)))
    assert checks["checkpoint"].status is Status.FAIL
    assert "config.json" in checks["checkpoint"].found
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "cohere2"}))
    checks = by_name(machine_checks.described(describe(folder)))
    assert checks["decoder"].status is Status.WARN
    assert "models of type cohere2" in checks["decoder"].found


def description(**changed: Any) -> dict[str, Any]:
    model = {
        "architecture": "A",
        "decoder": "own",
        "reason": None,
        "weights_bytes": GIB,
        "kv_bytes_per_token": 1 << 20,
        "state_bytes": 0,
        "max_model_len": 1024,
    }
    whole = {
        "cores": 2,
        "free_bytes": 4 * GIB,
        "processor_refusal": None,
        "cpu_support": CPU_SUPPORT,
        "gpus": None,
        "gpu_software": None,
        "gpu_decoder_refusal": None,
        "contents": None,
        "model": model,
        "error": None,
    }
    return whole | changed


@pytest.mark.parametrize(
    ("free_gib", "status"), [(4, Status.OK), (1.5, Status.WARN), (0.5, Status.FAIL)]
)
def test_memory_must_hold_the_weights_and_should_hold_a_long_sequence(
    free_gib: float, status: Status
) -> None:
    found = by_name(machine_checks.described(description(free_bytes=free_gib * GIB)))
    assert found["memory"].status is status


def test_a_gpu_needs_its_driver_a_build_of_torch_and_compute_capability() -> None:
    gpu = {
        "name": "G",
        "compute_capability": "7.5",
        "can_run": False,
        "free_bytes": 2 * GIB,
        "total_bytes": 3 * GIB,
        "support": [],
    }
    new = gpu | {
        "compute_capability": "9.0",
        "can_run": True,
        "support": [
            {"field": "numerics", "value": "strict", "refusal": "runs on CPUs"},
            {"field": "numerics", "value": "fast", "refusal": None},
        ],
    }
    software = {"driver": "570.86", "triton": "3.7", "flash-attn": None}
    sound = {"gpu_software": software, "gpu_decoder_refusal": None}
    bare = sound | {"gpu_decoder_refusal": "no C compiler is installed"}
    hidden = new | {"free_bytes": None, "total_bytes": None}
    for changed, status in (
        ({"gpus": None}, Status.OK),
        ({"gpus": [], **sound}, Status.WARN),
        ({"gpus": [gpu], **sound}, Status.FAIL),
        ({"gpus": [new], **bare}, Status.WARN),
        ({"gpus": [hidden], **sound}, Status.WARN),
        ({"gpus": [new], **sound}, Status.OK),
    ):
        found = by_name(machine_checks.described(description(**changed)))
        assert found["gpu"].status is status
        runs = [new] == changed["gpus"] or [hidden] == changed["gpus"]
        assert ("gpu support" in found) is runs
        is_own = changed.get("gpu_decoder_refusal") is None
        assert ("on the GPU" in found["decoder"].found) is (runs and is_own)
        assert (found["decoder"].status is Status.OK) is (is_own or not runs)
    assert found["gpu"].found == (
        "G, compute capability 9.0, 2.0 of 3.0 GiB free; driver 570.86, triton 3.7, "
        "flash-attn absent"
    )
    assert found["gpu support"].found == "numerics fast; not strict (runs on CPUs)"
    assert "2.0 GiB free of the GPU" in found["memory"].found
    found = by_name(machine_checks.described(description(gpus=[gpu], **sound)))
    assert "free of the machine" in found["memory"].found, "the model runs on the CPU"


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        ("fpu fma avx2 f16c avx512f amx_bf16", Status.OK, "avx512f, amx_bf16"),
        ("fpu avx2", Status.WARN, "no fma, f16c"),
    ],
)
def test_the_processor_must_have_what_the_own_decoder_needs(
    flags: str, status: Status, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n")
    found = machine_checks.processor(cpuinfo)
    assert found.status is status
    assert named in found.found


class Servicer(gateway_pb2_grpc.GenerationServiceServicer):
    """Tells its models."""

    def __init__(self, *model_ids: str) -> None:
        self._models = [gateway_pb2.Model(model_id=each, num_verifiers=2) for each in model_ids]

    def Generate(
        self, request: gateway_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[gateway_pb2.GenerateResponse]:
        raise NotImplementedError

    LoadPool: Any = None  # not called

    def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse(models=self._models)


def serve(
    servicer: Servicer,
    certificate: trustme.LeafCert | None = None,
    client_ca: trustme.CA | None = None,
) -> tuple[grpc.Server, str]:
    server = grpc.server(ThreadPoolExecutor(1))
    gateway_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    if certificate is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        credentials = grpc.ssl_server_credentials(
            [(certificate.private_key_pem.bytes(), chain)],
            root_certificates=client_ca.cert_pem.bytes() if client_ca else None,
            require_client_auth=client_ca is not None,
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server, f"127.0.0.1:{port}"


def target(address: str, ca: Path | None = None) -> dict[str, Check]:
    checks = target_checks.target(
        address,
        tls=TlsOptions(ca=ca) if ca else None,
        token=None,
        allow_plaintext_token=False,
        is_expected=True,
    )
    return {check.name.split()[0]: check for check in checks}


@pytest.mark.stand_in
@pytest.mark.parametrize("has_model", [True, False])
def test_a_gateway_must_answer_and_serve_a_model(has_model: bool) -> None:
    server, address = serve(Servicer("demo") if has_model else Servicer())
    try:
        found = target(address)["gateway"]
    finally:
        server.stop(0).wait()
    if has_model:
        assert (found.status, found.found) == (Status.OK, "serves demo (2 verifiers)")
    else:
        assert (found.status, found.advice) == (Status.FAIL, "see the gateway's logs")


@pytest.mark.stand_in
@pytest.mark.parametrize(
    ("days", "is_trusted", "status"),
    [(90, True, Status.OK), (3, True, Status.WARN), (90, False, Status.FAIL)],
)
def test_a_certificate_must_be_trusted_and_should_last(
    days: int, is_trusted: bool, status: Status, tmp_path: Path
) -> None:
    authority, other = trustme.CA(), trustme.CA()
    end = datetime.datetime.now(tz=datetime.UTC) + datetime.timedelta(days=days, hours=1)
    server, address = serve(
        Servicer("demo"), authority.issue_cert("127.0.0.1", not_after=end.replace(tzinfo=None))
    )
    file = tmp_path / "ca.pem"
    (authority if is_trusted else other).cert_pem.write_to_path(str(file))
    try:
        found = target(address, file)
        by_scheme = target(f"ipv4:{address}", file)
    finally:
        server.stop(0).wait()
    assert found["certificate"].status is by_scheme["certificate"].status is status
    assert found["gateway"].status is (Status.OK if is_trusted else Status.FAIL)
    if is_trusted:
        assert f"{end:%Y-%m-%d}" in found["certificate"].found


@pytest.mark.stand_in
def test_a_gateway_that_wants_a_certificate_of_its_client_is_no_matter_of_its_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = trustme.CA()
    server, address = serve(Servicer("demo"), authority.issue_cert("127.0.0.1"), authority)
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    try:
        found = target(address, ca)
        code = main(["generate", "--target", address, "--tls-ca", str(ca), "ren"])
    finally:
        server.stop(0).wait()
    assert found["certificate"].status is Status.OK
    assert found["gateway"].status is Status.FAIL
    assert code == 1
    for text in (found["gateway"].advice, capsys.readouterr().err):
        assert {"--tls", "--tls-ca", "--tls-cert"} <= set(re.findall(r"--[a-z-]+", text))


@pytest.mark.stand_in
def test_a_gateway_tells_of_each_model_what_drafts_bring_and_how_it_is_sampled() -> None:
    servicer = Servicer("older", "demo")
    defaults = gateway_pb2.SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1
    )
    servicer._models[1].http_sampling_defaults.CopyFrom(defaults)
    servicer._models[1].speculation_note = "1.00 tokens per step"
    server, address = serve(servicer)
    try:
        checks = list(
            target_checks.target(
                address, tls=None, token=None, allow_plaintext_token=False, is_expected=True
            )
        )
    finally:
        server.stop(0).wait()
    assert [each.name for each in checks[1:]] == ["speculation demo", "sampling demo"]
    assert checks[1].found == "1.00 tokens per step"
    assert checks[2].found.endswith(
        ": temperature 0.6, top_p 0.95, top_k 20, min_p 0, repetition_penalty 1"
    )
