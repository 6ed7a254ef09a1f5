"""A program of torch.export in a fresh process."""

import sys

import graph
import protocol
import torch


@torch.no_grad()
def main() -> None:
    job = protocol.job()
    torch.set_num_threads(1)
    program = torch.export.load(f"{job['folder']}/model.pt2")
    module = program.module()
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    # After tokens and mask.
    past = [values[name] for name in program.graph_signature.user_inputs[2:]]

    def empty(batch):
        return [torch.zeros(batch, x.shape[1], 0, x.shape[3], dtype=x.dtype) for x in past]

    def call(tokens, mask, past):
        logits, present = module(torch.as_tensor(tokens), torch.as_tensor(mask), past)
        return logits.float().numpy(), present

    found = graph.run(call, empty, job)
    assert "transformers" not in sys.modules
    protocol.answer(
        version=torch.__version__,
        dtype=str(past[0].dtype).removeprefix("torch."),
        ran_as="ExportedProgram",
        **found,
    )


if __name__ == "__main__":
    main()
