//! Addresses of a migration in QMP: the arguments `uri` and `channels`, with QEMU's error messages.

use hotlift::Address;
use hotlift::transport::TransportError;
use hotlift_qmp::SocketAddress;
use hotlift_qmp::qapi::{Member, Type, needed};
use hotlift_qmp::server::Refusal;
use serde_json::{Map, Value};

use crate::command_table::check_members;

static CHANNEL: &[Member] = &[
    needed("channel-type", Type::Str),
    needed("addr", Type::Object("MigrationAddress")),
];
static TRANSPORT: &[Member] = &[needed("transport", Type::Str), needed("type", Type::Str)];
static INET: &[Member] = &[
    needed("transport", Type::Str),
    needed("type", Type::Str),
    needed("host", Type::Str),
    needed("port", Type::Str),
];
static UNIX: &[Member] = &[
    needed("transport", Type::Str),
    needed("type", Type::Str),
    needed("path", Type::Str),
];

/// Returns the address in the arguments of `migrate` or `migrate-incoming`: from `uri` or from `channels`.
pub fn of_arguments(arguments: &Map<String, Value>) -> Result<Address, Refusal> {
    let neither_or_both = || Refusal::generic("need either 'uri' or 'channels' argument");
    match (
        arguments.get("uri").and_then(Value::as_str),
        arguments.get("channels").and_then(Value::as_array),
    ) {
        (Some(uri), None) => of_uri(uri),
        (None, Some(channels)) => match &channels[..] {
            [channel] => of_channel(channel),
            [] => Err(neither_or_both()),
            _ => Err(Refusal::generic(
                "Channel list must have only one entry, for type 'main'",
            )),
        },
        _ => Err(neither_or_both()),
    }
}

/// Parses the address in a migration URI.
pub fn of_uri(uri: &str) -> Result<Address, Refusal> {
    uri.parse().map_err(|error| {
        Refusal::generic(match error {
            TransportError::BadAddress { address, .. } => {
                format!("error parsing address '{address}'")
            }
            _ => format!("unknown migration protocol: {uri}"),
        })
    })
}

fn of_channel(channel: &Value) -> Result<Address, Refusal> {
    let object = |value: &Value, name: &str| {
        value.as_object().cloned().ok_or_else(|| {
            Refusal::generic(format!(
                "Invalid parameter type for '{name}', expected: object"
            ))
        })
    };
    let channel = object(channel, "channels[0]")?;
    check_members(CHANNEL, &channel, "channels[0].")?;
    accept(&channel, "channel-type", &["main"])?;
    let address = object(&channel["addr"], "channels[0].addr")?;
    let prefix = "channels[0].addr.";
    if let Some(Value::String(_)) = address.get("transport") {
        accept(&address, "transport", &["socket"])?;
    }
    let known: Map<_, _> = address
        .iter()
        .filter(|(name, _)| TRANSPORT.iter().any(|member| member.name == *name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    check_members(TRANSPORT, &known, prefix)?;
    accept(&address, "type", &["inet", "unix"])?;
    let text = |name: &str| address[name].as_str().unwrap_or_default();
    if address["type"] == "unix" {
        check_members(UNIX, &address, prefix)?;
        return of_uri(&format!("unix:{}", text("path")));
    }
    check_members(INET, &address, prefix)?;
    let (host, port) = (text("host"), text("port"));
    of_uri(&if host.contains(':') {
        format!("tcp:[{host}]:{port}")
    } else {
        format!("tcp:{host}:{port}")
    })
}

fn accept(object: &Map<String, Value>, name: &str, values: &[&str]) -> Result<(), Refusal> {
    match object.get(name).and_then(Value::as_str) {
        Some(value) if !values.contains(&value) => Err(Refusal::generic(format!(
            "Parameter '{name}' does not accept value '{value}'"
        ))),
        _ => Ok(()),
    }
}

/// Converts an address to the type of member `socket-address` of `query-migrate`.
pub fn to_qapi(address: &Address) -> SocketAddress {
    let of_kind = |kind: &str| SocketAddress {
        kind: kind.to_owned(),
        host: None,
        port: None,
        ipv4: None,
        path: None,
    };
    match address {
        Address::Tcp { host, port } => {
            let host = if host.is_empty() { "0.0.0.0" } else { host };
            SocketAddress {
                host: Some(host.to_owned()),
                port: Some(port.to_string()),
                ipv4: Some(!host.contains(':')),
                ..of_kind("inet")
            }
        }
        Address::Unix { path } => SocketAddress {
            path: Some(path.display().to_string()),
            ..of_kind("unix")
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(arguments: &Value) -> Result<String, String> {
        of_arguments(arguments.as_object().unwrap())
            .map(|address| address.to_string())
            .map_err(|refusal| refusal.desc)
    }

    fn channel(addr: &Value) -> Value {
        json!({ "channels": [{ "channel-type": "main", "addr": addr }] })
    }

    #[test]
    fn both_forms_of_an_address_are_equal() {
        assert_eq!(parse(&json!({ "uri": "tcp:h:1" })).unwrap(), "tcp:h:1");
        for (addr, uri) in [
            (
                json!({ "transport": "socket", "type": "inet", "host": "::1", "port": "5" }),
                "tcp:[::1]:5",
            ),
            (
                json!({ "transport": "socket", "type": "unix", "path": "/s" }),
                "unix:/s",
            ),
        ] {
            assert_eq!(parse(&channel(&addr)).unwrap(), uri);
        }
    }

    #[test]
    fn an_invalid_address_is_refused_with_qemus_message() {
        let either = "need either 'uri' or 'channels' argument";
        let inet = |port: &Value| json!({ "transport": "socket", "type": "inet", "host": "h", "port": port });
        for (arguments, desc) in [
            (json!({}), either),
            (json!({ "channels": [] }), either),
            (json!({ "uri": "tcp:h:1", "channels": [] }), either),
            (
                json!({ "channels": [{}, {}] }),
                "Channel list must have only one entry, for type 'main'",
            ),
            (
                json!({ "uri": "nope:1" }),
                "unknown migration protocol: nope:1",
            ),
            (
                json!({ "uri": "tcp:127.0.0.1" }),
                "error parsing address '127.0.0.1'",
            ),
            (
                json!({ "channels": [1] }),
                "Invalid parameter type for 'channels[0]', expected: object",
            ),
            (
                json!({ "channels": [{ "channel-type": "x", "addr": {} }] }),
                "Parameter 'channel-type' does not accept value 'x'",
            ),
            (
                channel(&json!({ "transport": "nope", "type": "inet" })),
                "Parameter 'transport' does not accept value 'nope'",
            ),
            (
                channel(&json!({ "transport": "socket", "type": "inet", "host": "h" })),
                "Parameter 'channels[0].addr.port' is missing",
            ),
            (
                channel(&inet(&json!(5))),
                "Invalid parameter type for 'channels[0].addr.port', expected: string",
            ),
            (channel(&inet(&json!("x"))), "error parsing address 'h:x'"),
        ] {
            assert_eq!(parse(&arguments).unwrap_err(), desc, "{arguments}");
        }
    }
}
