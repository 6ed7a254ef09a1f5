"""`ssmax convert`: a Hugging Face model in, a converted one out."""

import dataclasses
import json
from typing import Annotated, Any

import typer

from ssmax.cli.options import Adapter, Json, Model, Out
from ssmax.errors import UsageError


def convert(
    model: Model,
    out: Out,
    init: Annotated[
        str, typer.Option(help="Where s and b start: identity, paper or anneal.")
    ] = "identity",
    train_length: Annotated[
        int | None, typer.Option(help="The length the model was trained at.")
    ] = None,
    rule: Annotated[
        str,
        typer.Option(help="Scaling rule: ssmax, or another of docs/rules.md."),
    ] = "ssmax",
    bias: Annotated[
        bool | None,
        typer.Option(
            "--bias/--no-bias", help="Learn a bias per head; by default as --init needs it."
        ),
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Layers to convert: full (no sliding window) or all.")
    ] = "full",
    attention: Annotated[
        str, typer.Option(help="Attention to convert: self, or all (cross attention too).")
    ] = "self",
    adapter: Adapter = False,
    remote_code: Annotated[
        bool,
        typer.Option("--remote-code", help="Add a file of code, so that it loads without ssmax."),
    ] = False,
    json_: Json = False,
) -> None:
    """Convert a Hugging Face model to SSMax, verify it and save it."""
    from ssmax._files import check_empty, whole_folder
    from ssmax.hf.choices import check_choice, check_layers
    from ssmax.hf.sources import check_typed

    if adapter and remote_code:
        raise UsageError("--adapter writes s and b alone, without a model for --remote-code")
    check_empty(out)
    # All that can be told before weights are read, which may take minutes.
    check_choice(rule, init, train_length, bias)
    check_layers(layers, attention)
    check_typed(model, of_an_adapter="give that model itself to ssmax convert")
    import ssmax.hf
    from ssmax.hf.full_checkpoint import load_source
    from ssmax.hf.inputs import copy_inputs
    from ssmax.hf.verification import UnverifiedError

    converted = load_source(model)
    choice: Any = {"rule": rule, "init": init, "layers": layers, "attention": attention}
    ssmax.hf.convert(converted, train_length=train_length, bias=bias, **choice)
    record = converted.config.ssmax
    unverified, about = "", {"layers": len(record["layers"])}
    try:
        about = dataclasses.asdict(ssmax.hf.verify(converted))
    except UnverifiedError as error:
        # Converted all the same: only somebody with its pictures or sounds can look.
        unverified = str(error)
    how = f"ssmax.hf.from_pretrained({str(out)!r})"
    with whole_folder(out) as partial:
        if adapter:
            ssmax.hf.save(converted, partial)
            how = f"ssmax.hf.load(base, {str(out)!r})"
        elif remote_code:
            auto = ssmax.hf.save_remote_code(converted, partial)
            how += (
                ", which runs no code of the folder; people without ssmax who trust that code, "
                f"with {auto}.from_pretrained({str(out)!r}, trust_remote_code=True)"
            )
        else:
            converted.save_pretrained(partial)
        if not adapter:
            copy_inputs(model, partial, converted.config)
    total = sum(parameter.numel() for parameter in converted.parameters())
    ours = sum(p.numel() for name, p in converted.named_parameters() if ".ssmax." in name)
    if json_:
        about |= {"verified": not unverified, "rule": record["rule"], "init": record["init"]}
        print(json.dumps({"out": str(out), "learned": ours, "parameters": total, **about}))
        return
    print(
        f"{type(converted).__name__}: {about['layers']} attention layers converted"
        f"{'' if unverified else ' and verified'}, {ours:,} of {total:,} parameters are s and b"
    )
    if unverified:
        print(f"not verified: {unverified}")
    print(f"{out}: load it with {how}")
