//! Detects foreign nftables rules by which connections miss the agent's redirect. Reads the output of `nft -j list ruleset`.
//!
//! A match expression that this module does not understand counts as true: a false report is better than a missed rule.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::config::Config;
use crate::rules::TABLE;
use crate::values::Ports;

/// Priority of conntrack at output: a notrack rule in a later chain has no effect (`linux/netfilter_ipv4.h`,
/// `NF_IP_PRI_CONNTRACK`).
const CONNTRACK: i64 = -200;

/// Priority of the chain that redirects. If two chains translate a connection, only the first translation applies.
const REDIRECT: i64 = -100;

/// Longest sequence of jumps from chain to chain; the kernel's limit is also 16 (`NFT_JUMP_STACK_SIZE`).
const DEEPEST: usize = 16;

/// Family and name of a table.
type InTable<'a> = (&'a str, &'a str);

/// The connections that must be redirected.
#[derive(Debug, Clone, Copy)]
struct Connections<'a> {
    ports: Ports,
    users: &'a [u32],
}

/// Search through the chains that outgoing packets pass, for rules that prevent the redirect.
struct Walk<'a> {
    rules: BTreeMap<(InTable<'a>, &'a str), Vec<&'a Value>>,
    of: Connections<'a>,
    /// Type of the base chain (the chain at the hook) from which the search started, as in "nat".
    kind: &'a str,
    priority: i64,
    /// Chains that were already visited from the chain at the hook: several jumps may lead to the same chain.
    visited: BTreeSet<(InTable<'a>, &'a str)>,
    /// Reasons found so far; a set, since two hooks may lead to the same chain.
    found: BTreeSet<String>,
}

/// Returns true if `listed` contains the agent's table. Also returns the foreign rules that keep connections from being
/// redirected. Only connections of `users` to the ports of `config` count.
#[must_use]
pub fn bypasses(listed: &str, config: &Config, users: &[u32]) -> (bool, Vec<String>) {
    let listed: Value = serde_json::from_str(listed).unwrap_or_default();
    let objects = || listed["nftables"].as_array().into_iter().flatten();
    let has_table = objects().any(|object| {
        let table = &object["table"];
        table["family"] == "inet" && table["name"] == TABLE
    });
    let mut walk = Walk {
        rules: BTreeMap::new(),
        of: Connections {
            ports: config.ports,
            users,
        },
        kind: "",
        priority: 0,
        visited: BTreeSet::new(),
        found: BTreeSet::new(),
    };
    for rule in objects().map(|object| &object["rule"]) {
        if let Some((table, chain)) = table_and_key(rule, "chain") {
            walk.rules.entry((table, chain)).or_default().push(rule);
        }
    }
    for chain in objects().map(|object| &object["chain"]) {
        let Some((table, name)) = table_and_key(chain, "name") else {
            continue;
        };
        let family = ["inet", "ip", "ip6"].contains(&table.0);
        let is_own = table == ("inet", TABLE);
        if let (true, false, "output", Some(priority), Some(kind)) = (
            family,
            is_own,
            chain["hook"].as_str().unwrap_or_default(),
            chain["prio"].as_i64(),
            chain["type"].as_str(),
        ) {
            (walk.kind, walk.priority) = (kind, priority);
            walk.visited.clear();
            walk.chain(table, name, 0);
        }
    }
    (has_table, walk.found.into_iter().collect())
}

/// Returns the table of a JSON object, and the chain that its field `key` names; `None` if a field is missing.
fn table_and_key<'a>(object: &'a Value, key: &str) -> Option<(InTable<'a>, &'a str)> {
    let text = |key: &str| object[key].as_str();
    Some(((text("family")?, text("table")?), text(key)?))
}

impl<'a> Walk<'a> {
    fn chain(&mut self, table: InTable<'a>, name: &'a str, depth: usize) {
        if depth > DEEPEST || !self.visited.insert((table, name)) {
            return;
        }
        let rules = self.rules.get(&(table, name)).cloned();
        for rule in rules.unwrap_or_default() {
            let Some(expressions) = rule["expr"].as_array() else {
                continue;
            };
            if !expressions.iter().all(|one| self.of.may_match(one)) {
                continue;
            }
            for expression in expressions {
                if let Some(what) = self.past(expression) {
                    let (family, table) = table;
                    let handle = &rule["handle"];
                    self.found.insert(format!(
                        "table {family} {table}, chain {name}, handle {handle}: {what}"
                    ));
                }
            }
            let mut next = Vec::new();
            targets(rule, &mut next);
            for target in next {
                self.chain(table, target, depth + 1);
            }
        }
    }

    /// Returns why an expression makes connections miss the redirect; `None` if it does not.
    fn past(&self, expression: &Value) -> Option<&'static str> {
        let of_xtables = expression["xt"]["name"].as_str().unwrap_or_default();
        let has = |name: &str| expression.get(name).is_some();
        let changed = expression["mangle"]["key"]["payload"]["field"].as_str();
        let is_before = self.priority < CONNTRACK;
        let translates = self.kind == "nat" && self.priority <= REDIRECT;
        if is_before && (has("notrack") || ["CT", "NOTRACK"].contains(&of_xtables)) {
            return Some("notrack: untracked packets cannot be redirected");
        }
        if translates
            && (has("dnat") || has("redirect") || ["DNAT", "REDIRECT"].contains(&of_xtables))
        {
            return Some("it translates the destination before the agent's table does");
        }
        if self.priority < REDIRECT && matches!(changed, Some("dport" | "daddr")) {
            return Some("it changes the destination before the agent's table sees it");
        }
        None
    }
}

/// Collects in `into` the chains that `value`, a rule, jumps to. Searches nested expressions, too.
fn targets<'a>(value: &'a Value, into: &mut Vec<&'a str>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| targets(value, into)),
        Value::Object(fields) => {
            for (key, value) in fields {
                match (key.as_str(), value["target"].as_str()) {
                    ("jump" | "goto", Some(target)) => into.push(target),
                    _ => targets(value, into),
                }
            }
        }
        _ => {}
    }
}

impl Connections<'_> {
    /// Returns true if a packet of these connections may match `expression`.
    fn may_match(self, expression: &Value) -> bool {
        let matched = &expression["match"];
        let (left, right) = (&matched["left"], &matched["right"]);
        let is_not = matched["op"] == "!=";
        let meta = left["meta"]["key"].as_str().unwrap_or_default();
        let payload = &left["payload"];
        let protocol = payload["protocol"].as_str().unwrap_or_default();
        let field = payload["field"].as_str().unwrap_or_default();
        let (first, last) = (u64::from(self.ports.first), u64::from(self.ports.last));
        let (some, all) = match (meta, protocol, field) {
            ("oifname" | "oif", _, _) => {
                let is_loopback = right == "lo";
                // The agent does not know all interfaces: a match with '!=' may be true for one of them.
                (!is_loopback, false)
            }
            ("l4proto", _, _) | (_, "ip", "protocol") | (_, "ip6", "nexthdr") => {
                let is_tcp = holds(right, &|one| one == "tcp" || one == 6);
                (is_tcp, is_tcp)
            }
            ("skuid", _, _) => {
                let has = |user: &u32| spans(right, u64::from(*user), u64::from(*user)).0;
                (self.users.iter().any(has), self.users.iter().all(has))
            }
            (_, "tcp" | "th", "dport") => spans(right, first, last),
            (_, "ip" | "ip6", "daddr") => {
                let is_loopback = right["prefix"]["addr"] == "127.0.0.0"
                    || right == "127.0.0.1"
                    || right == "::1";
                (!is_loopback, false)
            }
            (_, "udp" | "udplite" | "sctp" | "dccp" | "icmp" | "icmpv6" | "igmp", _) => {
                return false;
            }
            _ if left["fib"]["result"] == "type" => {
                let is_local = right == "local";
                (!is_local, false)
            }
            // Not understood, or no match expression.
            _ => return true,
        };
        match is_not {
            true => !all,
            false => some,
        }
    }
}

/// Returns true if `is_it` is true for `value` or, if `value` is a set, for one of its members.
fn holds(value: &Value, is_it: &dyn Fn(&Value) -> bool) -> bool {
    match value["set"].as_array() {
        Some(values) => values.iter().any(is_it),
        None => is_it(value),
    }
}

/// Returns two flags: true if `numbers` contain at least one number from `first` to `last`, and true if they contain all. A
/// named set counts as containing some.
fn spans(numbers: &Value, first: u64, last: u64) -> (bool, bool) {
    if let Some(values) = numbers["set"].as_array() {
        let each = values.iter().map(|one| spans(one, first, last));
        return each.fold((false, false), |sum, one| (sum.0 || one.0, sum.1 || one.1));
    }
    let range = match (numbers.as_u64(), numbers["range"].as_array()) {
        (Some(one), _) => Some((one, one)),
        (None, Some(range)) => range
            .first()
            .and_then(Value::as_u64)
            .zip(range.get(1).and_then(Value::as_u64)),
        (None, None) => None,
    };
    match range {
        Some((from, to)) => (from <= last && first <= to, from <= first && last <= to),
        None => (true, false),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the findings in a ruleset with the agent's table and a foreign output chain with these rules.
    fn found(kind: &str, priority: i64, rules: &[Value]) -> Vec<String> {
        let mut objects = vec![
            json!({"metainfo": {"json_schema_version": 1}}),
            json!({"table": {"family": "inet", "name": "hotlift_agent"}}),
            json!({"chain": {"family": "inet", "table": "others", "name": "o", "type": kind, "hook": "output",
                "prio": priority}}),
        ];
        for rule in rules {
            let (chain, expr) = match rule.get("chain") {
                Some(chain) => (chain.as_str().unwrap(), &rule["expr"]),
                None => ("o", rule),
            };
            objects.push(
                json!({"rule": {"family": "inet", "table": "others", "chain": chain, "handle": 7,
                "expr": expr}}),
            );
        }
        let listed = json!({ "nftables": objects }).to_string();
        let (has_table, found) = bypasses(&listed, &Config::default(), &[0, 64055]);
        assert!(has_table);
        found
    }

    fn port(op: &str, right: &Value) -> Value {
        let left = json!({"payload": {"protocol": "tcp", "field": "dport"}});
        json!({"match": {"op": op, "left": left, "right": right}})
    }

    fn meta(key: &str, right: &Value) -> Value {
        json!({"match": {"op": "==", "left": {"meta": {"key": key}}, "right": right}})
    }

    fn to(protocol: &str, right: &Value) -> Value {
        let left = json!({"payload": {"protocol": protocol, "field": "daddr"}});
        json!({"match": {"op": "==", "left": left, "right": right}})
    }

    #[test]
    fn notrack_rules_are_found_only_for_migration_ports() {
        let notrack = json!({"notrack": null});
        let ports = |right: Value| port("==", &right);
        for (condition, is_found) in [
            (ports(json!(49152)), true),
            (ports(json!({"range": [49000, 49152]})), true),
            (ports(json!({"set": [80, {"range": [49215, 60000]}]})), true),
            (ports(json!("@ports")), true),
            (ports(json!(53)), false),
            (ports(json!({"set": [80, 443]})), false),
            (port("!=", &json!(53)), true),
            (port("!=", &json!({"range": [49152, 49215]})), false),
            (meta("skuid", &json!(64055)), true),
            (meta("skuid", &json!({"set": [33, 34]})), false),
            (meta("oifname", &json!("lo")), false),
            (meta("oifname", &json!("eth0")), true),
            (
                json!({"match": {"op": "!=", "left": {"meta": {"key": "oifname"}}, "right": {"set": ["lo", "virbr0"]}}}),
                true,
            ),
            (to("ip", &json!("127.0.0.1")), false),
            (to("ip", &json!("192.0.2.2")), true),
            (to("ip6", &json!("::1")), false),
            (to("ip6", &json!("2001:db8::2")), true),
            (meta("l4proto", &json!("udp")), false),
            (meta("l4proto", &json!({"set": ["udp", "tcp"]})), true),
            (json!({"counter": {"packets": 0, "bytes": 0}}), true),
            (
                json!({"match": {"op": "in", "left": {"ct": {"key": "status"}}, "right": "snat"}}),
                true,
            ),
            (
                json!({"match": {"op": "==", "left": {"payload": {"protocol": "udp", "field": "dport"}}, "right": 53}}),
                false,
            ),
        ] {
            let found = found("filter", -300, &[json!([condition, notrack])]);
            assert_eq!(!found.is_empty(), is_found, "{condition}");
        }
        let rule = [json!([notrack])];
        assert_eq!(found("filter", 0, &rule), [""; 0], "it has no effect");
        assert_eq!(
            found("filter", -300, &rule),
            [
                "table inet others, chain o, handle 7: notrack: untracked packets cannot be redirected"
            ]
        );
    }

    #[test]
    fn a_nat_rule_is_found_through_chains_before_the_redirect_but_not_after_it() {
        let dnat = json!({"dnat": {"family": "ip", "addr": "192.0.2.2"}});
        for (kind, priority, is_found) in [
            ("nat", -150, true),
            ("nat", -100, true),
            ("nat", -50, false),
        ] {
            let rules = [
                json!([{"vmap": {"key": {"meta": {"key": "mark"}}, "data": {"set": [[1, {"goto": {"target": "x"}}]]}}}]),
                json!({"chain": "x", "expr": [{"jump": {"target": "y"}}, {"jump": {"target": "x"}}]}),
                json!({"chain": "y", "expr": [dnat]}),
            ];
            assert_eq!(
                !found(kind, priority, &rules).is_empty(),
                is_found,
                "{priority}"
            );
        }
        let changed = json!([{"mangle": {"key": {"payload": {"protocol": "ip", "field": "daddr"}}, "value": "192.0.2.2"}}]);
        assert_eq!(
            found("route", -150, std::slice::from_ref(&changed)).len(),
            1
        );
        let local = json!({"match": {"op": "==", "left": {"fib": {"result": "type", "flags": ["daddr"]}},
            "right": "local"}});
        // As in Docker's rules.
        assert_eq!(found("nat", -100, &[json!([local, dnat])]), [""; 0]);
    }

    #[test]
    fn a_chain_with_several_callers_is_walked_once() {
        let mut rules = vec![json!([{"jump": {"target": "c1"}}])];
        for chain in 1..DEEPEST {
            let jump = json!({"jump": {"target": format!("c{}", chain + 1)}});
            let rule = json!({"chain": format!("c{chain}"), "expr": [jump]});
            rules.extend(std::iter::repeat_n(rule, 16));
        }
        rules.push(json!({"chain": format!("c{DEEPEST}"), "expr": [{"notrack": null}]}));
        assert_eq!(found("filter", -300, &rules).len(), 1);
    }

    #[test]
    fn text_that_is_no_ruleset_yields_no_rules() {
        for odd in [
            "",
            "[]",
            "{\"nftables\": [1, {\"chain\": 1}, {\"rule\": {\"expr\": 1}}]}",
        ] {
            let (has_table, found) = bypasses(odd, &Config::default(), &[0]);
            assert!(!has_table && found.is_empty(), "{odd}");
        }
    }
}
