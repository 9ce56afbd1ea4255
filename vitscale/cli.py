"""The console command: `vitscale VERB ...` looks the verb up and calls its main."""

import difflib
import importlib
import sys

import vitscale

VERBS = {
    "pack": ("data_prep.pack", "turn labelled images into a sharded dataset (also under mpiexec)"),
    "verify": ("data_prep.verify", "check a packed dataset: sizes, hashes, pictures"),
    "index": ("data_prep.index", "make shards of others a dataset, without rewriting them"),
    "labels": ("data_prep.labels", "list, add or remove label columns of a packed dataset"),
    "dedup": ("data_prep.dedup", "list training pictures that are copies of others"),
    "stats": ("data_prep.stats", "count classes, sizes and formats of a packed dataset"),
    "show": ("data_prep.show", "say what a packed dataset holds, or print samples of it"),
    "bench pack": ("data_prep.bench_pack", "measure the packer beside other writers"),
    "bench data": ("launchers.bench_data", "measure the training loader beside others"),
    "doctor": ("launchers.doctor", "foretell how a run will read a dataset, and what will fail"),
    "pretrain": ("launchers.pretrain", "train a model from a recipe"),
    "finetune": ("launchers.finetune", "go on from trained weights: new head, new image size"),
    "evaluate": ("launchers.evaluate", "measure top-1, top-5 and loss of a checkpoint"),
    "audit": ("launchers.audit", "prove from a run's folder that each sample was fed once"),
    "export": ("launchers.export", "write a checkpoint's weights as one safetensors file"),
}


def usage() -> str:
    """Return the help text."""
    width = max(len(verb) for verb in VERBS)
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        [
            "usage: vitscale VERB [options]",
            "",
            "Pack image corpora, train Vision Transformers on DeepSpeed, measure them.",
            "",
            *lines,
            "",
            "vitscale VERB --help explains a verb and shows examples; vitscale --version.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit code: 0 done, 2 wrong input, 3 damaged data, 4 broken numbers, 75 stopped and
        resumable, 1 else.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"vitscale {vitscale.__version__}")
        return 0
    # Verbs of two words share the first one.
    group = [verb for verb in VERBS if verb.startswith(f"{words[0]} ")]
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print("\n".join(f"vitscale {verb}  {VERBS[verb][1]}" for verb in group))
        return 0 if words[1:] else 2
    num_words = 2 if group else 1
    verb, rest = " ".join(words[:num_words]), words[num_words:]
    if verb not in VERBS:
        close = difflib.get_close_matches(verb.lower(), VERBS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(VERBS)}"
        print(f"error: no verb {verb!r}; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(VERBS[verb][0])
    code: int = module.main(rest)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
