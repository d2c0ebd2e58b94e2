"""`tandem doctor`: each fault is found, named, and comes with what to do."""

import datetime
import json
import platform
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import grpc
import pytest
import safetensors
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tandem.cli import main, up
from tandem.cli.checks import machine_checks, target_checks
from tandem.cli.checks.check import Check, Status
from tandem.cli.up import BUNDLED_MODEL, INSTALL_ALL
from tandem.transport.channel import TlsOptions
from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from tests.encrypted_key import encrypted_key
from tests.servicekit.gguf_files import write_model
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


def test_services_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "find_spec", lambda module: None if module == "torch" else object())
    services = by_name(machine_checks.versions())["services"]
    assert services.status is Status.WARN
    assert services.found == "the packages of verifier are not installed"
    assert services.advice.startswith(INSTALL_ALL)


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


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            "quantization_config: quant_method aqlm",
        ),
        ({"model_type": "gpt_oss"}, "attention with sinks is not served"),
        ({"model_type": "strange"}, "strange"),
    ],
)
def test_a_model_that_neither_decoder_serves_fails(
    changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    checks = by_name(machine_checks.described(describe(folder)))
    assert checks["checkpoint"].status is Status.FAIL
    assert reason in checks["checkpoint"].found
    assert "decoder" not in checks


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


def test_a_files_tensors_are_counted_by_type(tmp_path: Path) -> None:
    path = write_model(tmp_path / "small.gguf", {"token_embd": "Q8_0", "": "Q4_1"})
    held = gguf.GGUFReader(path).tensors
    found = by_name(machine_checks.described(describe(path)))["contents"].found
    assert found.startswith(f"llama, {path.stat().st_size / MIB:.1f} MiB, tensors: ")
    for kind in ("Q4_1", "Q8_0", "F32"):
        sizes = [int(each.n_bytes) for each in held if each.tensor_type.name == kind]
        assert f"{len(sizes)} of {kind} ({sum(sizes) / MIB:.1f} MiB)" in found
    # Also of a file that is not served.
    path = write_model(tmp_path / "strange.gguf", "F16", architecture="strange")
    checks = by_name(machine_checks.described(describe(path)))
    assert checks["contents"].found.startswith("strange, ")
    assert checks["checkpoint"].status is Status.FAIL
    path.write_bytes(b"GGUF")
    assert "contents" not in by_name(machine_checks.described(describe(path)))


def test_a_folders_tensors_are_counted_by_type() -> None:
    found = by_name(machine_checks.described(describe(BUNDLED_MODEL)))["contents"].found
    with safetensors.safe_open(BUNDLED_MODEL / "model.safetensors", "np") as file:
        types = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
    assert set(types) == {"BF16"}
    size = (BUNDLED_MODEL / "model.safetensors").stat().st_size / MIB
    assert found.startswith(f"Qwen3ForCausalLM, {size:.1f} MiB, tensors: {len(types)} of BF16 (")


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


class Refusing(Servicer):
    """Knows no client."""

    def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> gateway_pb2.ListModelsResponse:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")


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


@pytest.mark.parametrize(
    ("config", "status", "told"),
    [
        (None, Status.OK, "temperature 1, top_p 1, top_k 0, min_p 0, repetition_penalty 1"),
        ('{"temperature": 0.6, "top_k": 20}', Status.OK, "temperature 0.6, top_p 1, top_k 20"),
        ('{"top_p": "high", "top_k": 20}', Status.WARN, "top_p of 'high', which is ignored"),
        ("{", Status.FAIL, "generation_config.json: Expecting property name"),
    ],
)
def test_a_model_folder_tells_how_it_is_sampled_over_http(
    tmp_path: Path, config: str | None, status: Status, told: str
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(config)
    first, *others = machine_checks.sampling(tmp_path)
    assert (first.name, first.status) == ("sampling", status)
    assert told in first.found
    assert [each.status for each in others] == [Status.OK] * (status is Status.WARN)


@pytest.mark.stand_in
def test_what_a_gateway_that_nobody_named_answers_is_told(unused_tcp_port: int) -> None:
    def found(address: str) -> Check:
        (check,) = target_checks.target(
            address, tls=None, token=None, allow_plaintext_token=False, is_expected=False
        )
        return check

    absent = found(f"127.0.0.1:{unused_tcp_port}")
    assert (absent.status, absent.found) == (Status.WARN, "nobody answers there")
    speaks_tls, address = serve(Servicer("demo"), trustme.CA().issue_cert("127.0.0.1"))
    try:
        encrypted = found(address)
    finally:
        speaks_tls.stop(0).wait()
    assert encrypted.status is Status.FAIL
    assert "UNAVAILABLE" in encrypted.found
    assert "--tls" in encrypted.advice
    server, address = serve(Refusing())
    try:
        refusing = found(address)
    finally:
        server.stop(0).wait()
    assert refusing.status is Status.FAIL
    assert "UNAUTHENTICATED" in refusing.found


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


def authority_without_key_usage() -> trustme.CA:
    """As `openssl req -x509` makes it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    now = datetime.datetime.now(tz=datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=90))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return trustme.CA.from_pem(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


@pytest.mark.stand_in
def test_an_authority_that_grpc_accepts_is_trusted_also_by_a_python_that_asks_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ssl.create_default_context

    def as_in_python_3_13(cafile: Path | None = None) -> ssl.SSLContext:
        context = original(cafile=cafile)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_in_python_3_13)
    authority = authority_without_key_usage()
    server, address = serve(Servicer("demo"), authority.issue_cert("127.0.0.1"))
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    try:
        found = target(address, file)
    finally:
        server.stop(0).wait()
    assert found["certificate"].status is Status.OK, found["certificate"].found
    assert found["gateway"].status is Status.OK


def test_ctrl_c_while_a_gateway_does_not_answer_exits_with_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [
                *(sys.executable, "-m", "tandem", "doctor", "--model", "/nonexistent"),
                "--target",
                target,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                while "model: /nonexistent" not in process.stdout.readline():
                    assert process.poll() is None
                with silent.accept()[0]:
                    process.send_signal(signal.SIGINT)
                    rest, errors = process.communicate(timeout=60.0)
            finally:
                process.kill()
    assert (process.returncode, rest, errors) == (130, "", "")


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_token_file_must_be_there_and_be_text(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{")  # no model, so that nothing is loaded
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    assert main(["doctor", "--model", str(tmp_path), "--token-file", str(file)]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("fail token-file: ")


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


def test_an_encrypted_key_is_told_before_the_gateway_is_asked(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    own = trustme.CA().issue_cert("127.0.0.1")
    certificate, key = tmp_path / "cert", tmp_path / "key"
    own.cert_chain_pems[0].write_to_path(str(certificate))
    key.write_bytes(encrypted_key(own))
    (found,) = target_checks.target(
        f"127.0.0.1:{unused_tcp_port}",
        tls=TlsOptions(certificate=certificate, key=key),
        token=None,
        allow_plaintext_token=False,
        is_expected=True,
    )
    assert found.status is Status.FAIL
    assert found.found == f"{key} is encrypted; give a key without passphrase"
    assert found.advice == "correct the files of --tls-*"
