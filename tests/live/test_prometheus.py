"""Metrics against a live broker, and the rules and the dashboard against a real Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
import yaml
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from queen_trio.metrics import FAMILIES, Kind
from tests.brokers import LiveBroker, postgres_environment, running_broker
from tests.http.api import Api, open_api
from tests.servers import free_port, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster import Cluster

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "compose/alerts.yml"
DASHBOARD = ROOT / "compose/grafana-dashboard.json"
PATH = "/metrics/prometheus"
WAIT_SECONDS = 20.0
POLL_SECONDS = 0.05
LAG = ("queen_consumer_lag_messages", "__QUEUE_MODE__", "orders")
NAME = re.compile(r"\b(?:queen|process)_[a-z_]+")


def promtool(*arguments: str | Path, text: str | None = None) -> str:
    """Run promtool; raises with what it says unless it is content."""
    done = subprocess.run(
        [unpacked() / "usr/bin/promtool", *arguments], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def quick_broker(cluster: Cluster, database: str) -> Iterator[LiveBroker]:
    """A broker with a peer that is never there, whose jobs run all the time."""
    with running_broker(
        postgres_environment(cluster.settings(database))
        | {
            "STATS_INTERVAL_MS": "50",
            "METRICS_FLUSH_MS": "50",
            "QUEEN_MESH_PORT": str(free_port()),
            "QUEEN_MESH_PEERS": "127.0.0.1:1",
        }
    ) as broker:
        yield broker


class Scrape:
    """One answer, by sample: its name and the values of its labels, which are sorted by name."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {
            name: family
            for family in parse_text(text)
            for name in (family.name, f"{family.name}_total")
        }
        self.samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __getitem__(self, key: str | tuple[str, ...]) -> float:
        return self.samples[(key,) if isinstance(key, str) else key]


async def scrape(api: Api) -> Scrape:
    response = await api.http.get(PATH)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(response.text)


async def scrape_with(api: Api, *samples: tuple[str, ...]) -> Scrape:
    """Scrape until there are these samples."""
    with trio.fail_after(WAIT_SECONDS):
        while True:
            found = await scrape(api)
            if all(sample in found.samples for sample in samples):
                return found
            await trio.sleep(POLL_SECONDS)


async def work(api: Api, queue: str) -> None:
    """Push 5 messages in one partition, complete 2, dead-letter 1, and leave 2."""
    await api.push(queue, *range(5))
    claim = await api.pop(queue, batch=3)
    assert claim is not None
    statuses = ("completed", "completed", "dlq")
    acks = [
        {
            "transactionId": message["transactionId"],
            "partitionId": claim["partitionId"],
            "leaseId": claim["leaseId"],
            "status": status,
        }
        for message, status in zip(claim["messages"], statuses, strict=True)
    ]
    response = await api.http.post("/api/v1/ack/batch", json={"acknowledgments": acks})
    assert [ack["success"] for ack in response.json()] == [True] * 3


async def test_what_is_counted(quick_broker: LiveBroker) -> None:
    async with open_api(quick_broker) as api:
        await work(api, "orders")
        assert (await api.http.get("/api/v1/pop/queue/empty")).status_code == 204
        found = await scrape_with(api, LAG, ("queen_dlq_messages", "orders"))
        # The flush job, which writes counters to PostgreSQL and starts anew, takes nothing away.
        for key, value in {
            "queen_pushed_messages_total": 5,
            "queen_popped_messages_total": 3,
            ("queen_acked_messages_total", "completed"): 2,
            ("queen_acked_messages_total", "dead_lettered"): 1,
            ("queen_acked_messages_total", "failed"): 0,
            "queen_push_calls_total": 1,
            "queen_ack_calls_total": 2,  # the dead letter takes a second one
            ("queen_fusion_items_sum", "push"): 5,
            ("queen_fusion_items_count", "push"): 1,
            ("queen_request_seconds_count", "push"): 1,
            ("queen_request_seconds_count", "pop"): 2,
            ("queen_request_seconds_count", "ack"): 1,
            ("queen_responses_total", "201"): 1,
            ("queen_responses_total", "204"): 1,
            ("queen_admission_admitted_total", "push"): 1,
            ("queen_admission_admitted_total", "ack"): 2,
            ("queen_call_seconds_count", "push"): 1,
            ("queen_dlq_messages", "orders"): 1,
            ("queen_mesh_peers", "disconnected"): 1,
            "queen_admission_budget": 8,
            ("queen_admission_band", "hi"): 8,
            "queen_pool_size": 10,
            "queen_spool_pending_messages": 0,
            "queen_draining": 0,
        }.items():
            assert found[key] == value, key
        assert found["queen_backlog_age_seconds"] < 90
        assert found["queen_job_runs_total", "lag"] > 0
        with trio.fail_after(WAIT_SECONDS):
            while (await scrape(api))[LAG] != 2:
                await trio.sleep(POLL_SECONDS)


async def test_all_of_the_list_is_shown_and_nothing_else(quick_broker: LiveBroker) -> None:
    async with open_api(quick_broker) as api:
        await work(api, "orders")
        found = await scrape_with(api, LAG, ("queen_dlq_messages", "orders"))
        shown = {
            (f.name + "_total" if f.type == "counter" else f.name): f
            for f in found.families.values()
        }
        assert set(shown) == set(FAMILIES) - {"queen_worker_up"}  # which is for workers
        for name in shown:
            family = FAMILIES[name]
            assert shown[name].type == family.kind.value, name
            assert shown[name].documentation == family.help
            for sample in shown[name].samples:
                assert set(sample.labels) - {"le"} == set(family.labels), name
        promtool("check", "metrics", text=found.text)


async def test_openmetrics_where_it_is_asked_for(quick_broker: LiveBroker) -> None:
    async with open_api(quick_broker) as api:
        await api.push("orders", 1)
        accept = "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"
        response = await api.http.get(PATH, headers={"accept": accept})
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        families = {family.name: family for family in parse_openmetrics(response.text)}
        assert families["queen_pushed_messages"].samples[0].value == 1


async def test_strange_names_are_escaped(quick_broker: LiveBroker) -> None:
    name = 'a "b"\\c\nd=é}'
    async with open_api(quick_broker) as api:
        await work(api, name)
        await scrape_with(
            api,
            ("queen_consumer_lag_messages", "__QUEUE_MODE__", name),
            ("queen_dlq_messages", name),
        )


async def test_a_scrape_asks_no_database(own_cluster: Cluster) -> None:
    with running_broker(postgres_environment(own_cluster.settings())) as broker:
        async with open_api(broker) as api:
            await api.push("orders", 1)
            await trio.to_thread.run_sync(own_cluster.stop)
            with trio.fail_after(5):
                found = await scrape(api)
            assert found["queen_pushed_messages_total"] == 1


# -- the rules and the dashboard -----------------------------------------------------------------


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def dashboard() -> list[tuple[str, str]]:
    """The queries of the dashboard with the titles of their panels, as Grafana would send them."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (
            panel["title"],
            target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m"),
        )
        for panel in panels
        for target in panel.get("targets", ())
    ]


def family_of(name: str) -> str:
    """The family to which a series belongs."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if stem in FAMILIES and FAMILIES[stem].kind is Kind.HISTOGRAM else name


def test_rules_and_dashboard_use_only_metrics_that_exist() -> None:
    queries = [(rule["alert"], rule["expr"]) for rule in alerts()] + dashboard()
    assert len(queries) > 40
    for title, query in queries:
        used = {family_of(name) for name in NAME.findall(query)}
        assert used <= set(FAMILIES), title
        assert used or "up{" in query, title


def test_the_rules_are_valid() -> None:
    assert "rules found" in promtool("check", "rules", ALERTS)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_the_rules_fire_when_they_should(tmp_path: Path) -> None:
    broker = 'instance="a:6632", job="queen"'
    series = {
        f"up{{{broker}}}": "1x30 0x30",
        f'queen_pool_connections{{{broker}, state="idle"}}': "0x60",
        f'queen_pool_connections{{{broker}, state="in_use"}}': "2x20 0x40",
        f"queen_pool_connect_failures_total{{{broker}}}": "0x20 0+9x40",
        f'queen_dlq_messages{{{broker}, queue="new"}}': "_x30 3x100",
        f'queen_dlq_messages{{{broker}, queue="old"}}': "3x100",
        f'queen_consumer_lag_seconds{{{broker}, queue="q", group="g"}}': "0x20 5000x40",
        f'queen_responses_total{{{broker}, status="200"}}': "0+9x60",
        f'queen_responses_total{{{broker}, status="503"}}': "0x20 0+1x40",
    }
    expected = {
        "QueenDown": [(25, 0), (45, 1)],
        "QueenDatabaseUnreachable": [(15, 0), (30, 1)],
        "QueenDeadLetters": [(40, 2), (80, 1), (95, 0)],  # after an hour it is no news
        "QueenConsumerLag": [(25, 0), (35, 1)],
        "QueenErrors": [(15, 0), (35, 1)],
    }
    rules = {rule["alert"]: rule for rule in alerts()}
    assert set(expected) <= set(rules)
    promql = [
        {
            "eval_time": f"{minute}m",
            "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
            "exp_samples": [{"labels": "{}", "value": count}],
        }
        for name, times in expected.items()
        for minute, count in times
    ]
    tests = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "promql_expr_test": promql,
            }
        ],
    }
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump(tests))
    promtool("test", "rules", file)


@contextmanager
def running_prometheus(directory: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes `target` five times a second; its URL."""
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {
                "job_name": "queen",
                "metrics_path": PATH,
                "static_configs": [{"targets": [target]}],
            }
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            unpacked() / "usr/bin/prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
    )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


async def test_a_real_prometheus_understands_all(quick_broker: LiveBroker, tmp_path: Path) -> None:
    async with open_api(quick_broker) as api:
        await work(api, "orders")
        await scrape_with(api, ("queen_dlq_messages", "orders"))
    with running_prometheus(tmp_path, f"127.0.0.1:{quick_broker.port}") as url:
        async with httpx.AsyncClient(base_url=url) as http:

            async def ask(query: str) -> list[Any]:
                response = await http.get("/api/v1/query", params={"query": query})
                answer = response.json()
                assert answer["status"] == "success", (query, answer)
                result: list[Any] = answer["data"]["result"]
                return result

            with trio.fail_after(WAIT_SECONDS):
                while True:
                    try:
                        if await ask("count_over_time(queen_info[1m]) > 3"):
                            break
                    except (httpx.TransportError, json.JSONDecodeError):
                        pass  # not up yet
                    await trio.sleep(POLL_SECONDS)
            for title, query in dashboard():
                # A quantile or a ratio of what didn't happen is NaN, which is a result, too.
                assert await ask(query), f"{title} shows nothing: {query}"
            rules = (await http.get("/api/v1/rules")).json()["data"]["groups"][0]["rules"]
            assert len(rules) == len(alerts())
            assert [rule["name"] for rule in rules if rule.get("lastError")] == []


def test_the_reference_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/metrics_docs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
