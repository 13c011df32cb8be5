"""What dashboards and alerts ask for is what the processes expose, and traces are sent where the collector listens."""

import asyncio
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics
from gateway.router_metrics import router_metrics
from gateway.upstream import Upstream
from protos import inference_pb2
from router.events import RouterEvents
from router.load_report import LoadReporter
from router.metrics import RouterCollector
from tests.doubles.images import ROOT

FOLDER = ROOT / "compose/observability"
OVERRIDE = yaml.safe_load((ROOT / "compose/compose.observability.yaml").read_text())
BASE = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
DASHBOARD = json.loads((FOLDER / "grafana/quire.json").read_text())
# Words of the query language, and what Prometheus itself adds to a sample.
FUNCTIONS = {"sum", "max", "min", "rate", "increase", "histogram_quantile", "absent", "by", "or", "le"}
OF_PROMETHEUS = {"up": {"job"}}


def queries() -> Iterator[tuple[str, str]]:
    """Every query, by where it stands."""
    for group in ALERTS["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """The labels of every sample that a gateway shows, before a router with one worker, when all has happened once."""

    class Reporter:
        def report(self) -> inference_pb2.GetLoadResponse:
            worker = inference_pb2.GetLoadResponse.Worker(address="a:1", ready=True, max_slots=1)
            worker.start_seconds["weights"] = 1.0
            return inference_pb2.GetLoadResponse(workers=[worker])

    metrics, events = Metrics(), RouterEvents()
    metrics.http_requests.labels("/v1/models", "200").inc()
    metrics.request_success.labels("stop").inc()
    events.failures.labels("QUEUE_FULL").inc()
    of_router = RouterCollector(cast(LoadReporter, Reporter()), events).expose()

    class Router:
        async def get_metrics(self) -> bytes:
            return of_router

    text = (metrics.expose() + asyncio.run(router_metrics(cast(Upstream, Router())))).decode()
    found: dict[str, set[str]] = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize(("where", "query"), [*queries()])
def test_queries_ask_for_what_is_exposed(where: str, query: str, exposed: dict[str, set[str]]) -> None:
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", query)
    names = set(re.findall(r"[a-zA-Z_]\w*", bare))
    metrics = {name for name in names if name in exposed or name.startswith("quire")}
    assert metrics, where
    assert metrics <= exposed.keys()
    labels = names - metrics - FUNCTIONS
    assert labels <= set.union(*(exposed[name] for name in metrics)), where
    assert bare.count("(") == bare.count(")")


def test_a_renamed_metric_would_be_noticed(exposed: dict[str, set[str]]) -> None:
    with pytest.raises(AssertionError):
        test_queries_ask_for_what_is_exposed("here", "sum(rate(quire_no_such_total[5m]))", exposed)
    with pytest.raises(AssertionError):
        test_queries_ask_for_what_is_exposed("here", "sum by (gpu) (quire_worker_ready)", exposed)


def test_panels_do_not_overlap_and_have_one_source() -> None:
    sources = yaml.safe_load((FOLDER / "grafana/sources.yaml").read_text())["datasources"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} <= {source["uid"] for source in sources}
    for source in sources:
        host = re.fullmatch(r"http://(\w+):\d+", source["url"])
        assert host is not None
        assert host[1] in OVERRIDE["services"]


def test_processes_send_traces_to_the_collector(tmp_path: Path) -> None:
    collector = yaml.safe_load((FOLDER / "collector.yaml").read_text())
    port = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    model = tmp_path / "model.gguf"
    model.touch()
    for process in ("gateway", "router", "worker"):
        before, command = BASE["services"][process]["command"], OVERRIDE["services"][process]["command"]
        assert command[: len(before)] == before
        argv = [str(model) if word.endswith(".gguf") else word for word in command]
        config = importlib.import_module(f"{process}.config").parse_args(argv)
        assert config.otlp_traces_endpoint == f"http://collector:{port}"
        assert set(BASE["services"][process]["networks"]) & set(OVERRIDE["services"]["collector"]["networks"])
    for exporter in collector["service"]["pipelines"]["traces"]["exporters"]:
        host = collector["exporters"][exporter]["endpoint"].partition(":")[0]
        assert host in OVERRIDE["services"]


def test_prometheus_asks_the_gateway_and_has_the_alerts() -> None:
    settings = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    (job,) = settings["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert found["names"] == ["gateway"]
    assert BASE["services"]["gateway"]["ports"][0].endswith(f":{found['port']}")
    mounted = [volume.split(":")[:2] for volume in OVERRIDE["services"]["prometheus"]["volumes"]]
    folder = str(Path(dict(mounted)["./observability/prometheus.yaml"]).parent)
    assert dict(mounted)["./observability/alerts.yaml"] == f"{folder}/{settings['rule_files'][0]}"


@pytest.mark.parametrize("name", sorted(set(OVERRIDE["services"]) - set(BASE["services"])))
def test_what_is_beside_us_is_kept_in_too(name: str) -> None:
    service: dict[str, Any] = OVERRIDE["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for volume in service["volumes"]:
        source = volume.split(":")[0]
        assert source in OVERRIDE["volumes"] or (ROOT / "compose" / source).is_file()
