"""Configuration: one frozen section per component, from flags, environment and defaults.

Flags, `OCTAVO_*` variables and help texts derive from the fields here (`octavo.cli.flags` reads them), so a new option is one field.
Each component receives only its own section. This module does not know the components or how values are parsed.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class Help(msgspec.Struct, frozen=True):
    """Annotation of a field: its help text, how its flag differs from the field's name, and bounds of a number (inclusive)."""

    text: str
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    secret: bool = False
    low: float | None = None
    high: float | None = None
    opposite: str | None = None
    """Another flag that switches a boolean off."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections. Changed copies come from `msgspec.structs.replace`."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """Which model is served, and how it is read."""

    model: Annotated[str, Help("catalogue name, .gguf file, Hugging Face folder or repository id")] = "smollm2-135m"
    served_model_name: Annotated[
        tuple[str, ...], Help("names clients may use for the model; default: the model's own", metavar="NAME")
    ] = ()
    revision: Annotated[str | None, Help("branch, tag or commit of a Hugging Face repository")] = None
    chat_template: Annotated[
        str | None, Help("file with a Jinja chat template to use instead of the model's own, or the template itself")
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        Help(
            "JSON object of template arguments for requests that do not set them, such as enable_thinking",
            metavar="JSON",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Help("activations, KV cache and unquantized weights; quantized weights stay as stored"),
    ] = "auto"
    max_model_len: Annotated[
        int | None, Help("longest prompt plus output, in tokens; default: the model's own, reduced if it does not fit")
    ] = None
    generation_config: Annotated[
        Literal["auto", "none"],
        Help("take default sampling values from the model's generation_config.json (auto) or not"),
    ] = "auto"
    max_logprobs: Annotated[int, Help("most alternatives a request may ask for in logprobs")] = 20


class CacheConfig(Section, frozen=True, kw_only=True):
    """Memory for the KV cache."""

    block_size: Annotated[Literal[8, 16, 32], Help("tokens per KV block")] = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "int8"],
        Help("what K and V are kept as; auto follows --dtype, int8 takes half the memory of bfloat16"),
    ] = "auto"
    kv_cache_memory: Annotated[
        str | None,
        Help("memory for the KV cache, in bytes or with a suffix (512M, 2G)", aliases=("--kv-cache-memory-bytes",)),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Help("share of the device's free memory (on a CPU: RAM) to use for weights and KV cache", metavar="SHARE"),
    ] = None
    enable_prefix_caching: Annotated[bool, Help("reuse the KV blocks of equal prompt beginnings")] = True
    kv_offloading_size: Annotated[
        float,
        Help("GiB of files for evicted KV blocks, which come back on a hit, also after a restart; 0: none", low=0),
    ] = 0.0
    kv_offloading_folder: Annotated[
        str | None, Help("folder of these files, of one server at a time; default: kv beside the downloaded models")
    ] = None
    swap_space: Annotated[
        float,
        Help("GiB of memory for KV blocks of preempted requests, which are computed again otherwise; 0: none", low=0),
    ] = 0.0
    max_pinned_tokens: Annotated[
        int,
        Help("tokens of prompts that may be pinned in the prefix cache (cache_pin, /pin_prefix); 0: none", low=0),
    ] = 0


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """What runs together in a step."""

    max_num_seqs: Annotated[int, Help("most sequences that run at once")] = 64
    max_num_batched_tokens: Annotated[
        int | None,
        Help("most tokens computed in one step; default: 512, or the context length when prompts are not split"),
    ] = None
    enable_chunked_prefill: Annotated[bool, Help("split long prompts over several steps beside running decodes")] = True
    long_prefill_token_threshold: Annotated[
        int | None,
        Help(
            "the length from which on a prompt is long, and most tokens of long ones in a step beside requests that decode; 0: no bound; "
            "default: beyond half of max-num-batched-tokens is long, and a sixth of it, or 4 tokens for each that decodes, is the most",
            low=0,
        ),
    ] = None
    max_long_partial_prefills: Annotated[
        int | None,
        Help(
            "long prompts computed at the same time (with fair: of a tenant); shorter ones pass those that wait; default: 1",
            low=1,
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "fair"],
        Help("who runs first: by arrival, by the request's priority, or tenants (names of API keys) in turn"),
    ] = "fcfs"
    priority_ageing: Annotated[
        float | None,
        Help("with priority: seconds of waiting that outweigh one level of it; default: 60", low=0.001, high=86400),
    ] = None
    tenant_weights: Annotated[
        tuple[str, ...],
        Help("with fair: a tenant's weight as NAME=NUMBER; may be repeated; other tenants weigh 1", metavar="NAME=N"),
    ] = ()
    waiting_timeout: Annotated[
        float | None, Help("seconds a request may wait before it first runs, else it ends with an error", low=0.001)
    ] = None
    prefill_timeout: Annotated[
        float | None, Help("seconds from then to its first token, else it ends with an error", low=0.001)
    ] = None
    decode_timeout: Annotated[
        float | None, Help("seconds from its first token to its end, else it ends with an error", low=0.001)
    ] = None
    num_scheduler_steps: Annotated[
        int | None,
        Help(
            "most tokens that running requests are given in one go while all of them decode: less overhead, tokens come in bundles; "
            "default: 1, offline 8",
            low=1,
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        int | None,
        Help(
            "most requests waiting or running (with fair: of a tenant); further ones get 429 (n counts n times); default: 16 x "
            "max-num-seqs",
            low=1,
        ),
    ] = None


class BackendConfig(Section, frozen=True, kw_only=True):
    """What computes."""

    backend: Annotated[Literal["auto", "cpu", "numpy"], Help("cpu is native, numpy the readable reference")] = "auto"
    threads: Annotated[int | None, Help("threads of the native backend; default: the CPUs this process may use")] = None
    engine_process: Annotated[
        bool,
        Help("run the engine in a child process, so that after a native crash there is a server to tell its clients"),
    ] = False
    engine_restart: Annotated[
        bool, Help("with --engine-process: replace an engine that died instead of ending the server")
    ] = False


class StructuredConfig(Section, frozen=True, kw_only=True):
    """Structured outputs, tool calls and reasoning."""

    grammar_timeout: Annotated[
        float,
        Help("seconds of CPU time to compile a schema or grammar, else the request is refused", low=1.0, high=3600.0),
    ] = 10.0
    enable_jump_forward: Annotated[
        bool,
        Help("do not compute one by one the tokens that structured output leaves no choice of; outputs are the same"),
    ] = True
    tool_call_parser: Annotated[
        Literal["hermes", "qwen", "llama3_json", "mistral", "pythonic", "deepseek_v3", "glm45", "glm47", "qwen3_coder"]
        | None,
        Help("format in which the model calls tools; default: told from its chat template"),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool, Help("constrain calls that the model makes by itself (tool_choice auto) to the schemas of its tools")
    ] = False
    reasoning_parser: Annotated[
        Literal["deepseek_r1", "qwen3", "glm45"] | None,
        Help("format in which the model reasons before it answers, told apart as reasoning; default: none"),
    ] = None


class ServerConfig(Section, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, Help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Help("port to listen on; 0 takes a free one", low=0, high=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...], Help("key clients must send, or name:key; may be repeated", metavar="KEY", secret=True)
    ] = ()
    admin_api_key: Annotated[
        tuple[str, ...],
        Help("key for administrative routes, which are closed without; may be repeated", metavar="KEY", secret=True),
    ] = ()
    max_body_bytes: Annotated[int, Help("largest request body", low=1)] = 8 * 1024 * 1024
    max_header_bytes: Annotated[int, Help("largest request head: request line and headers", low=1024)] = 32 * 1024
    timeout_keep_alive: Annotated[int, Help("seconds an idle connection is kept open", low=0)] = 75
    shutdown_timeout: Annotated[
        float, Help("seconds that running requests get to finish after SIGTERM", low=0, high=86400)
    ] = 30.0
    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug", "trace"], Help("log level of the HTTP server")
    ] = "info"
    enable_docs: Annotated[
        bool,
        Help(
            "serve the API's description at /docs and /openapi.json, without a key", opposite="--disable-fastapi-docs"
        ),
    ] = True
    enable_log_requests: Annotated[
        bool, Help("log lines for each request: never its text", opposite="--disable-log-requests")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Help(
            "host names that requests may ask for, * for any; default: loopback names where the server listens on loopback and has no "
            "key, else any",
            metavar="HOST",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Help("web origins whose pages may call the server (CORS), * for any; default: only its own", metavar="ORIGIN"),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...], Help("methods that pages of other origins may use (CORS)", metavar="METHOD")
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...], Help("headers that pages of other origins may send (CORS)", metavar="HEADER")
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Help("pages of other origins may send cookies and keys of the browser (CORS)")
    ] = False
    ssl_certfile: Annotated[str | None, Help("serve HTTPS with this certificate (chain, PEM)", metavar="FILE")] = None
    ssl_keyfile: Annotated[
        str | None, Help("private key of --ssl-certfile (PEM), where it is not in that file", metavar="FILE")
    ] = None


class ResponsesConfig(Section, frozen=True, kw_only=True):
    """What is kept of the Responses API."""

    responses_store: Annotated[
        bool, Help("keep responses on disk, for retrieval and previous_response_id, unless a request says store=false")
    ] = False
    responses_store_path: Annotated[
        str | None,
        Help("file for kept responses (SQLite); default: responses.sqlite beside the model cache", metavar="FILE"),
    ] = None
    responses_store_max: Annotated[int, Help("most responses that are kept; the oldest go first", low=1)] = 10_000
    responses_store_max_bytes: Annotated[int, Help("most bytes that are kept; the oldest go first", low=1024)] = 1 << 30
    responses_store_ttl: Annotated[float, Help("seconds that a response is kept", low=1)] = 30 * 86400.0


class Config(Section, frozen=True, kw_only=True):
    """Everything `octavo serve` and `LLM` are configured by."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    backend: BackendConfig = BackendConfig()
    structured: StructuredConfig = StructuredConfig()
    server: ServerConfig = ServerConfig()
    responses: ResponsesConfig = ResponsesConfig()
