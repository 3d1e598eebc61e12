"""Generate on a TPU pod slice, or on any set of hosts: the same program runs on every one of them.

On a pod slice, from your own machine, with the slice's name and zone:

    gcloud compute tpus tpu-vm scp examples/pod.py NAME: --zone=ZONE --worker=all
    gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='COMMANDS'

where COMMANDS are: pip install "kvqjax[tpu] @ git+REPOSITORY"; python3 pod.py --model OWNER/NAME --mesh data=2,model=8

On other hosts, once on each, I counting from 0; every host must reach HOST0:PORT:

    python pod.py --coordinator HOST0:PORT --processes N --process I --model OWNER/NAME --mesh data=2,model=4

The mesh has the devices of all hosts together; docs/sharding.md says what each axis splits. Each
host reads only the slices of the weights that its devices hold. One host by itself: `--alone`.
"""

import argparse
from collections.abc import Sequence

import jax

import kvqjax as kvq
from kvqjax.model import locate
from kvqjax.model.hf_config import read_config
from kvqjax.parallel.hosts import speaks
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.sharding import rules_for


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a Hugging Face folder, or a hub id")
    parser.add_argument("--cache", default="kivi:bits=2", help="a spec string without calibration")
    parser.add_argument("--mesh", default="", help="devices along data, seq and model, e.g. data=2,model=8")
    parser.add_argument("--prompt", action="append", help="repeatable; `data` divides their number")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--coordinator", default="", help="host:port of process 0; a pod slice finds it by itself")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="this host only")
    return parser.parse_args(words)


def join(options: argparse.Namespace) -> None:
    """Before anything else of JAX: afterwards jax.devices() lists every host's."""
    if options.coordinator:
        kvq.join_hosts(options.coordinator, options.processes, options.process)
    elif not options.alone:
        jax.distributed.initialize()  # the slice's metadata name the hosts


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    join(options)
    method = kvq.parse(options.cache)
    size = MeshSize.parse(options.mesh or f"data={jax.device_count()}")
    rules = rules_for(read_config(locate(options.model)), method, size)
    model = kvq.load(options.model, sharding=rules)
    prompts = options.prompt or ["It was late in the evening when the traveller came at last to the house."] * size.data
    out = kvq.generate(model, prompts, method, max_new_tokens=options.max_new_tokens)
    if speaks():
        print(f"{jax.process_count()} hosts, {jax.device_count()} devices, {options.mesh or 'rows split'}")
        for prompt, text in zip(prompts, out.text, strict=True):
            print(f"--- {prompt}{text}")


if __name__ == "__main__":
    main()
