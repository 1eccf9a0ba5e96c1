"""`cygnet serve`: the options. What they start is in `cygnet.cli.server`."""

from typing import Annotated

import typer

from cygnet.cli.options import ConfigFile, LogLevel, Sets, resolve_config


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", show_default=False, help="built-in name, .gguf file, folder or hub id [gemma3-270m]"
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="port to listen on, 0: any free one [8000]")] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="require this key (or CYGNET_API_KEY)")] = None,
    served_model_name: Annotated[str | None, typer.Option(metavar="NAME", help="the model's name in the API")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="auto, bfloat16 or float32 [auto]")] = None,
    weight_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="auto, bfloat16, float32 or int8 [auto: as dtype]")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1 [auto]")] = None,
    max_model_len: Annotated[int | None, typer.Option(metavar="TOKENS", help="longest prompt + answer")] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="2GiB, or a fraction of free memory [0.25]")
    ] = None,
    host_cache: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="host memory below the KV cache: 8GiB, auto, off [auto]"),
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="FOLDER[:SIZE]", help="keep KV on disk below that, over restarts")
    ] = None,
    block_size: Annotated[int | None, typer.Option(metavar="TOKENS", help="tokens per KV block [16]")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(metavar="N", help="most requests running at once [64]")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="token budget of a step [1024]")
    ] = None,
    file: ConfigFile = None,
    sets: Sets = None,
    log_level: LogLevel = None,
) -> None:
    """Serve a model behind an OpenAI-compatible API."""
    options = {
        "model.model": model,
        "model.served_name": served_model_name,
        "model.dtype": dtype,
        "model.weight_dtype": weight_dtype,
        "model.device": device,
        "model.max_model_len": max_model_len,
        "kv.memory": kv_cache_memory,
        "kv.host_cache": host_cache,
        "kv.store": store,
        "kv.block_size": block_size,
        "engine.max_num_seqs": max_num_seqs,
        "engine.max_num_batched_tokens": max_num_batched_tokens,
        "api.host": host,
        "api.port": port,
        "api.api_key": api_key,
    }
    import asyncio

    from cygnet.cli.console import check_log_level, configure_logging
    from cygnet.cli.server import run_server

    level = check_log_level(log_level)
    configure_logging(level)
    config = resolve_config(file, sets, options).config
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        run = asyncio.run
    else:
        run = uvloop.run
    try:
        run(run_server(config, level))
    except asyncio.CancelledError:
        raise typer.Exit(143) from None  # SIGTERM while loading
