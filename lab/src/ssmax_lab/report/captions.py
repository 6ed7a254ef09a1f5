"""What the paper shows and claims, in our words, for the page and the terminal."""

CLAIMS = {
    "C1": "Softmax's largest output fades as the vector grows; SSMax's does not.",
    "C2": "A freely learned scale p_n of the logits comes out close to a1 log n + a2.",
    "C3": "Softmax needs an ever larger lead to focus; SSMax a lead of about 1/s, whatever n is.",
    "C4": "With SSMax the training loss is lower throughout; with a bias it is the lowest.",
    "C5": "SSMax keeps its loss far beyond the training length; the bias undoes that.",
    "C6": "With SSMax needle retrieval holds to about ten times the training length.",
    "C7": "SSMax's heads put their weight on the needle, softmax's do not.",
    "C8": "So it is in a hundred trials with random needles, and the answers follow.",
}

NOTES = {
    "quick": (
        "It shows the mechanism: with n softmax's heads lose their sharpness, and numbers are no "
        "longer found at lengths at which that was not taught. It cannot speak for models as "
        "large as the paper's; the gpu and paper presets can."
    ),
    "million": "The million preset tests retrieval where it can fail, and nothing else.",
    "small": "The small preset is for several seeds of each configuration.",
}
"""What a preset is for; what holds of one study only is in its note, from its settings."""

CAPTIONS: dict[str, str] = {
    "1": ("Largest output for an input of n - 1 entries of -2 and one of 3."),
    "2": (
        "The probe: softmax((s p_n + b) z) with p_n free for every n. Only the shape can "
        "be compared: s and b absorb the rest. p_1 is left out: a single key has weight 1 "
        "whatever it is, so it never learns."
    ),
    "3": ("Output of z_max for the input (0, 1/(n-2), ..., 1, z_max)."),
    "4": (
        "Training loss, smoothed over a fiftieth of the steps. The paper: (b), (c) and (d) "
        "below (a) throughout."
    ),
    "5": (
        "Loss at every position of test documents, theta changed at test time, nothing "
        "retrained. The paper: (b) and (c) better than (a) at long context, (d) degraded,"
        " (e) bad at short contexts, (f) close to (b). The RoPE limit is where the first pair of "
        "channels that made no full turn in training meets an angle that it was not trained at."
    ),
    "6": (
        "Needle retrieval accuracy (exact match) by context size and depth, after "
        "fine-tuning on questions. The paper: (a) fails past short contexts, (b) stays "
        "high to about ten times the training length, the others lie below it."
    ),
    "7": (
        "Attention from the last token of the prompt on the number of the paper's needle,"
        " for the heads with the most of it. The paper: (a) none, (b) concentrated, the "
        "others between."
    ),
    "8": (
        "The largest such weight of each trial, sorted; the marker tells the answer. The "
        "paper: (a) fails to focus, (b) focuses strongly, (c) to (f) partly."
    ),
}

CAPTIONS |= {
    "1_in_heads": "Of real text, means over layers, heads and documents: the largest attention "
    "weight of a query that sees n keys, and the entropy of its weights.",
    "_retrieval": "The share of hidden numbers that a model finds whole, after fine-tuning on "
    "questions, by the length of the context.",
    "_grid": "The share of hidden numbers that a model finds whole, by the length of the context. "
    "It was taught to find them in documents no longer than the first mark, in pretraining; a "
    "model that fails there did not learn the task, and has no part in a verdict.",
    "_s": "One value for each layer and head of the first run, coloured by its distance from the "
    "value it started at.",
}

CHOICES = (
    "The number of training steps and the text: the paper's are not known to us.",
    "The last eighth of the steps is (f)'s under SSMax.",
    (
        "The needle score of a head is the attention weight from the last token of the "
        "prompt, summed over the number's tokens."
    ),
    "Haystack, prompt, grid and number of trials; decoding is greedy.",
    "Questions of fine-tuning: the loss is on the answer only.",
    (
        "The control, a learned temperature without log n, is not the paper's; it has no "
        "part in a claim's verdict."
    ),
    "Which comparison decides a claim, and the least difference that counts.",
)
IN_PARTS = (
    "The study was made in parts, each on one machine. Comparisons are made within a part, then "
    "combined; the curves, but for those less (a), are means over all parts, whose machines "
    "differ by more than configurations may."
)
