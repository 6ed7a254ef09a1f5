"""ONNX Runtime with NumPy alone."""

import graph
import numpy as np
import onnxruntime
import protocol


def main() -> None:
    job = protocol.job()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    engine = onnxruntime.InferenceSession(f"{job['folder']}/model.onnx", options)
    names = [entry.name for entry in engine.get_inputs()]
    past = [entry for entry in engine.get_inputs() if "past" in entry.name]
    kind = {"tensor(float)": np.float32}[past[0].type]

    def empty(batch):
        return [np.zeros((batch, each.shape[1], 0, each.shape[3]), kind) for each in past]

    def call(tokens, mask, past):
        feed = dict(zip(names, (tokens, mask, *past), strict=True))
        logits, *present = engine.run(None, feed)
        return logits, present

    protocol.answer(
        version=onnxruntime.__version__, dtype="float32", ran_as="InferenceSession",
        **graph.run(call, empty, job),
    )  # fmt: skip


if __name__ == "__main__":
    main()
