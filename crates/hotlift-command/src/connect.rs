//! Connects to another host, at an address from a flag.

use std::time::Duration;

use hotlift::Address;
use hotlift::conversation::Conversation;
use hotlift::tls::Tls;

use crate::error::SharedError;

/// Timeout of a connection to the other host.
pub const CONNECT: Duration = Duration::from_secs(10);

/// Connects to the process that listens at `to`, with TLS if `tls` is given. `flag` is the flag that contained `to`, for
/// errors.
///
/// # Errors
/// If `to` is no TCP address, no process listens there, or the TLS handshake fails.
pub fn connect(
    to: &Address,
    flag: &'static str,
    tls: Option<&Tls>,
) -> Result<Conversation, SharedError> {
    if !matches!(to, Address::Tcp { .. }) {
        return Err(SharedError::OnlyTcp { flag });
    }
    let stream = to.connect(CONNECT);
    let stream = stream.map_err(|source| SharedError::NoServe { source })?;
    Ok(Conversation::new(match tls {
        Some(tls) => {
            let host = stream.peer_host();
            let secured = stream.secure(tls, Some(to.host()));
            secured.map_err(|source| SharedError::Tls {
                host,
                source: Box::new(source),
            })?
        }
        None => stream,
    }))
}
