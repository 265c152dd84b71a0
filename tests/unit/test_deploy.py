"""Deployment files agree with the code: no container engine needed to find a wrong name."""

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from swarm import __version__
from swarm.config import CoordinatorConfig, NodeConfig, load_config
from swarm.telemetry import METRICS, Telemetry
from swarm.types import Role

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = PROJECT["project"]["scripts"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "systemd" / f"{name}.service")
    return parser


def overrides_of(arguments: list[str]) -> list[str]:
    return [argument.removeprefix("--set=") for argument in arguments if argument.startswith("--set=")]


def join_overrides(name: str) -> list[str]:
    found = re.findall(r'--set "?([^"\s]+)"?', (DEPLOY / "join.sh").read_text())
    return [override.replace("${name}", name) for override in found]


def assert_options_exist(app: typer.Typer, arguments: list[str]) -> None:
    command = get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    used = {argument.split("=")[0] for argument in arguments[1:] if argument.startswith("--")}
    assert used <= known, used - known


@pytest.mark.parametrize("name", ["node", "laptop", "gpu"])
def test_node_configurations_are_valid_and_can_generate_and_learn(name: str):
    config = load_config(NodeConfig, DEPLOY / "configs" / f"{name}.toml")
    assert config.environments
    assert set(config.roles) == {Role.TRAINER, Role.GENERATOR}


def test_the_trainer_configuration_publishes_what_the_generator_configuration_follows():
    trainer = load_config(NodeConfig, DEPLOY / "configs" / "trainer.toml")
    generator = load_config(NodeConfig, DEPLOY / "configs" / "generator.toml")
    assert trainer.roles == (Role.TRAINER,) and trainer.weights.publish
    assert generator.roles == (Role.GENERATOR,) and not generator.weights.publish
    assert trainer.run_id == generator.run_id and trainer.model == generator.model
    assert trainer.environments == generator.environments
    assert trainer.generator.max_new_tokens == generator.generator.max_new_tokens
    assert trainer.replay.max_age_steps == generator.replay.max_age_steps


def test_the_coordinator_configuration_offers_the_run_that_the_node_configuration_joins():
    coordinator = load_config(CoordinatorConfig, DEPLOY / "configs" / "coordinator.toml")
    node = load_config(NodeConfig, DEPLOY / "configs" / "node.toml")
    assert coordinator.run_id == coordinator.node.run_id == node.run_id
    assert coordinator.node.environments == node.environments
    assert coordinator.node.replay == node.replay
    assert coordinator.node.generator.max_new_tokens == node.generator.max_new_tokens


@pytest.mark.parametrize("name", ["node", "laptop", "gpu", "trainer", "generator", "coordinator"])
def test_environments_and_recipes_of_the_configurations_exist(name: str):
    from swarm.environments.load import build_environments
    from swarm.objectives.methods import load_recipe

    kind = CoordinatorConfig if name == "coordinator" else NodeConfig
    config = load_config(kind, DEPLOY / "configs" / f"{name}.toml")
    node = config.node if isinstance(config, CoordinatorConfig) else config
    assert load_recipe(node.learner.recipe, node.learner.recipe_params)
    built = build_environments(node.environments)
    assert {env.name for env in node.environments} == set(built)


def test_compose_has_a_coordinator_and_three_nodes():
    nodes = [
        name
        for name, service in COMPOSE["services"].items()
        if service.get("entrypoint") == ["/bin/sh", "/opt/join.sh"]
    ]
    assert len(nodes) == 3 and "coordinator" in COMPOSE["services"]
    used = {mount.split(":")[0] for s in COMPOSE["services"].values() for mount in s["volumes"]}
    assert {volume for volume in used if not volume.startswith(".")} == set(COMPOSE["volumes"])
    for mount in used:
        assert not mount.startswith("./") or (DEPLOY / mount).exists(), mount


def test_nodes_of_compose_never_see_the_directory_with_the_coordinators_key():
    for name, service in COMPOSE["services"].items():
        holds = any(mount.startswith("coordinator:") for mount in service["volumes"])
        assert holds == (name in ("coordinator", "link")), name


def test_commands_and_overrides_of_compose_are_accepted():
    from coordinator.cli import app as coordinator_app

    arguments = COMPOSE["services"]["coordinator"]["command"]
    assert_options_exist(coordinator_app, arguments)
    load_config(CoordinatorConfig, DEPLOY / "configs" / "coordinator.toml", overrides_of(arguments))
    for name in ("ada", "bell", "curie"):
        own_name, *more = COMPOSE["services"][name]["command"]
        assert own_name == name
        config = load_config(NodeConfig, DEPLOY / "configs" / "node.toml", join_overrides(name) + overrides_of(more))
        assert config.exchange.advertise == f"{name}:7700"
        assert set(config.generator.env_weights) <= {"sums", "products"}


def test_join_script_calls_an_existing_command_with_existing_options():
    from swarm.cli.main import app

    text = (DEPLOY / "join.sh").read_text()
    subprocess.run(["sh", "-n", DEPLOY / "join.sh"], check=True)
    assert "swarm join" in text
    assert_options_exist(app, ["join", *(f"{option}=x" for option in re.findall(r"--[a-z-]+", text))])


def test_the_link_service_writes_a_link_that_nodes_can_parse(tmp_path: Path):
    from swarm.wire.join_link import JoinLink

    _, program = COMPOSE["services"]["link"]["command"][0], COMPOSE["services"]["link"]["command"][-1]
    record, link = tmp_path / "coordinator.json", tmp_path / "link"
    record.write_text(json.dumps({"fingerprint": "ab" * 32}))
    program = program.replace("/var/lib/swarm/state/coordinator.json", str(record))
    exec(compile(program.replace("/var/lib/swarm/link/link", str(link)), "link", "exec"), {})
    parsed = JoinLink.parse(link.read_text())
    run_id = load_config(CoordinatorConfig, DEPLOY / "configs" / "coordinator.toml").run_id
    assert parsed.run_id == run_id and parsed.fingerprint == "ab" * 32


def test_dockerfile_copies_what_exists_and_runs_what_is_installed():
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE):
        assert f"!{source}" in ignored
    entry = re.search(r'^ENTRYPOINT \["(.+)"\]$', text, re.MULTILINE)
    assert entry is not None and Path(entry.group(1)).name in SCRIPTS
    assert "USER swarm" in text.split("\nFROM ")[-1]
    extras = re.search(r"'\.\[(.+?)\]'", text)
    assert extras is not None and set(extras.group(1).split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_makefile_and_dockerfile_install_the_same_packages_bare():
    make, docker = (ROOT / "Makefile").read_text(), (DEPLOY / "Dockerfile").read_text()
    bare = re.search(r"^BARE := (.+)$", make, re.MULTILINE)
    needs = re.search(r"^BARE_NEEDS := (.+)$", make, re.MULTILINE)
    assert bare is not None and f"--no-deps {bare.group(1)}" in docker
    assert needs is not None and f"]' {needs.group(1)} \\" in docker
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert {name.lower() for name in (bare.group(1) + " " + needs.group(1)).split()} <= pinned


@pytest.mark.parametrize("name", ["swarm-node", "swarm-coordinator"])
def test_systemd_units_run_an_installed_command_and_are_hardened(name: str):
    service = unit(name)["Service"]
    executable, command, *arguments = service["ExecStart"].split()
    assert Path(executable).name == name and name in SCRIPTS
    assert command == "start" and "--config" in arguments
    assert service["RestartPreventExitStatus"] == "2"
    for key in ("NoNewPrivileges", "PrivateTmp", "ProtectKernelModules", "RestrictSUIDSGID", "LockPersonality"):
        assert service[key] == "yes", key
    kind = NodeConfig if name == "swarm-node" else CoordinatorConfig
    directory = load_config(kind, None, [arguments[arguments.index("--set") + 1]]).dir  # type: ignore[union-attr]
    assert directory == Path("/var/lib") / service["StateDirectory"]


def test_the_node_unit_lets_the_verifier_confine_itself():
    assert set(unit("swarm-node")["Service"]["RestrictNamespaces"].split()) == {"user", "net"}


@pytest.mark.parametrize("name", ["coordinator.yaml", "node.yaml"])
def test_kubernetes_manifests_run_an_installed_command_without_privileges(name: str):
    service, workload = documents(name)
    assert service["metadata"]["name"] == workload["spec"]["serviceName"]
    assert workload["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert Path(container["command"][0]).name in SCRIPTS
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in workload["spec"]["volumeClaimTemplates"]}
    assert mounted == claimed | {volume["name"] for volume in pod["volumes"]}
    exposed = {port["port"] for port in service["spec"]["ports"]}
    assert exposed <= {port["containerPort"] for port in container["ports"]}


def test_arguments_of_the_kubernetes_manifests_are_accepted():
    from coordinator.cli import app as coordinator_app
    from swarm.cli.main import app

    arguments = documents("coordinator.yaml")[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert_options_exist(coordinator_app, arguments)
    load_config(CoordinatorConfig, DEPLOY / "configs" / "coordinator.toml", overrides_of(arguments))
    container = documents("node.yaml")[1]["spec"]["template"]["spec"]["containers"][0]
    assert_options_exist(app, container["args"])
    arguments = [argument.replace("$(POD_NAME)", "swarm-node-0") for argument in container["args"]]
    load_config(NodeConfig, DEPLOY / "configs" / "node.toml", overrides_of(arguments))
    assert_options_exist(app, container["livenessProbe"]["exec"]["command"][1:])


def test_images_have_the_tag_of_this_version_everywhere():
    workloads = [documents(name)[1] for name in ("coordinator.yaml", "node.yaml")]
    containers = [each["spec"]["template"]["spec"]["containers"][0] for each in workloads]
    # without a tag Kubernetes pulls always, and an image that was only loaded is nowhere to be pulled from
    assert {each["image"] for each in containers} == {f"swarm-trainer:{__version__}"}
    assert {each["imagePullPolicy"] for each in containers} == {"IfNotPresent"}
    images = {each["image"] for each in COMPOSE["services"].values() if "build" in each}
    assert images == {f"swarm-trainer:{__version__}"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("name", ["swarm-node", "swarm-coordinator"])
def test_this_systemd_knows_every_line_of_the_units(name: str, tmp_path: Path):
    text = (DEPLOY / "systemd" / f"{name}.service").read_text()
    (tmp_path / f"{name}.service").write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", text))
    command = ["systemd-analyze", "verify", str(tmp_path / f"{name}.service")]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert [line for line in said.splitlines() if f"{name}.service" in line] == []


def scraped_names() -> set[str]:
    """Sample names as a scrape shows them, by the same library that serves them."""
    samples = [sample for family in Telemetry().registry.collect() for sample in family.samples]
    labelled = {metric.prometheus_name for metric in METRICS.values() if metric.labels}  # no sample before first use
    return {sample.name for sample in samples} | labelled


def test_the_dashboard_asks_only_for_metrics_and_labels_that_exist():
    board = json.loads((DEPLOY / "grafana" / "swarm.json").read_text())
    labels = {label for metric in METRICS.values() for label in metric.labels} | {"instance", "le"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 10
    for panel in board["panels"]:
        (target,) = panel["targets"]
        used = set(re.findall(r"swarm_\w+", target["expr"]))
        assert used and used <= scraped_names(), (panel["title"], used - scraped_names())
        grouped = re.findall(r"by \(([^)]+)\)", target["expr"])
        named = {label.strip() for group in grouped for label in group.split(",")}
        named |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) | set(
            re.findall(r"(\w+)=\"", target["expr"])
        )
        assert named <= labels, (panel["title"], named - labels)


def test_alerts_ask_only_for_metrics_and_labels_that_exist_and_say_what_to_do():
    from swarm.cli.main import app

    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (rules,) = config["rule_files"]
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    alerts = [
        alert
        for group in yaml.safe_load((DEPLOY / "prometheus" / rules).read_text())["groups"]
        for alert in group["rules"]
    ]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) > 10
    commands = get_command(app).commands  # type: ignore[attr-defined]
    labels_of = {metric.prometheus_name: set(metric.labels) for metric in METRICS.values()}
    for alert in alerts:
        used = set(re.findall(r"swarm_\w+", alert["expr"]))
        assert used <= scraped_names() and (used or "up{" in alert["expr"]), (alert["alert"], used - scraped_names())
        assert set(re.findall(r'job="([^"]+)"', alert["expr"])) <= jobs
        labels = {"instance", "job"}.union(*(labels_of.get(name, set()) for name in used))
        assert set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])) <= labels, alert["alert"]
        assert alert["labels"]["severity"] in ("warning", "critical") and alert["annotations"]["action"]
        for command in re.findall(r"swarm (\w+)", alert["annotations"]["action"]):
            assert command in commands, command


def test_prometheus_scrapes_the_ports_that_the_services_listen_on():
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in scrape for static in job["static_configs"] for target in static["targets"]}
    hosts = {target.split(":")[0] for target in targets}
    assert hosts <= set(COMPOSE["services"])
    ports = {override.rsplit(":", 1)[1] for override in join_overrides("x") if "metrics_listen" in override}
    assert {target.split(":")[1] for target in targets if not target.startswith("coordinator")} == ports
