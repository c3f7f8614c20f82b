//! The TLS handshake. It reads record by record, so bytes after the handshake stay in the socket.

use std::io::{Read, Write};

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use rustls::{CommonState, ExtractedSecrets};

use crate::error::TlsError;
use crate::link::Keys;
use crate::record::{HEADER, MAX_CIPHERTEXT};
use crate::sniff::is_tls;
use crate::socket::BoundedSocket;

/// Common interface of rustls's client and server connections.
pub(crate) trait Connection {
    type Data;
    type Keys: Keys + 'static;

    fn process<'c, 'i>(&'c mut self, records: &'i mut [u8])
    -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn common(&self) -> &CommonState;

    fn into_secrets(self) -> Result<(ExtractedSecrets, Self::Keys), rustls::Error>;
}

/// rustls has no trait for the common methods.
macro_rules! connection {
    ($connection:ty, $data:ty) => {
        impl Connection for $connection {
            type Data = $data;
            type Keys = KernelConnection<$data>;

            fn process<'c, 'i>(
                &'c mut self,
                records: &'i mut [u8],
            ) -> UnbufferedStatus<'c, 'i, Self::Data> {
                self.process_tls_records(records)
            }

            fn common(&self) -> &CommonState {
                self
            }

            fn into_secrets(self) -> Result<(ExtractedSecrets, Self::Keys), rustls::Error> {
                self.dangerous_into_kernel_connection()
            }
        }
    };
}

connection!(UnbufferedClientConnection, ClientConnectionData);
connection!(UnbufferedServerConnection, ServerConnectionData);

/// Next step of [`drive`].
enum Next {
    Again,
    ReadRecord,
    Done,
    Failed(rustls::Error),
}

/// A fatal alert, unexpected_message (RFC 8446, section 6), as a record.
const NOT_TLS: [u8; 7] = [0x15, 0x03, 0x03, 0x00, 0x02, 0x02, 0x0a];

/// Drives `connection` until both sides have sent Finished. Reports errors of rustls to the peer, and returns them
/// unchanged in [`TlsError::Handshake`].
pub(crate) fn drive<C: Connection>(
    connection: &mut C,
    socket: &mut BoundedSocket<'_>,
) -> Result<(), TlsError> {
    // Records that rustls still needs: it joins fragmented messages here.
    let mut received = Vec::new();
    let mut to_send = Vec::new();
    let mut is_first = true;
    loop {
        let UnbufferedStatus { discard, state } = connection.process(&mut received);
        let next = match state {
            Ok(ConnectionState::EncodeTlsData(message)) => {
                encode(message, &mut to_send);
                Next::Again
            }
            Ok(ConnectionState::TransmitTlsData(state)) => {
                // `to_send` is sent before the next read.
                state.done();
                Next::Again
            }
            Ok(ConnectionState::BlockedHandshake) => Next::ReadRecord,
            Ok(ConnectionState::WriteTraffic(_)) => Next::Done,
            Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => {
                return Err(TlsError::Closed);
            }
            Ok(state) => Next::Failed(rustls::Error::General(format!("unexpected {state:?}"))),
            Err(error) => Next::Failed(error),
        };
        received.drain(..discard);
        match next {
            Next::Again => {}
            // A server can send data before the client's last message has arrived: it continues to read.
            Next::Done if !connection.common().is_handshaking() => {
                return write_all(socket, &mut to_send);
            }
            Next::Done | Next::ReadRecord => {
                // A client sends this record with the data that follows (RFC 8446, appendix D.4). On a socket without
                // TCP_NODELAY, a record sent alone would delay the data until the peer acknowledges the record, about 40 ms
                // later.
                if to_send != CHANGE_CIPHER_SPEC {
                    write_all(socket, &mut to_send)?;
                }
                read_record(socket, &mut received, is_first)?;
                is_first = false;
            }
            Next::Failed(error) => {
                send_alert(connection, &mut to_send, socket);
                return Err(TlsError::Handshake(error));
            }
        }
    }
}

/// A record without meaning in TLS 1.3, sent for middleboxes (RFC 8446, appendix D.4).
const CHANGE_CIPHER_SPEC: [u8; 6] = [20, 3, 3, 0, 1, 1];

fn write_all(socket: &mut BoundedSocket<'_>, to_send: &mut Vec<u8>) -> Result<(), TlsError> {
    let sent = socket.write_all(to_send);
    to_send.clear();
    sent.map_err(|error| socket.explain(error))
}

fn encode<D>(mut message: EncodeTlsData<'_, D>, to_send: &mut Vec<u8>) {
    let at = to_send.len();
    if let Err(EncodeError::InsufficientSize(error)) = message.encode(&mut []) {
        to_send.resize(at + error.required_size, 0);
        // The buffer has the required size.
        let _ = message.encode(&mut to_send[at..]);
    }
}

/// Appends the next record to `received`, without any later bytes.
fn read_record(
    socket: &mut BoundedSocket<'_>,
    received: &mut Vec<u8>,
    is_first: bool,
) -> Result<(), TlsError> {
    let mut header = [0; HEADER];
    read_exact(socket, &mut header)?;
    let [kind, major, minor, high, low] = header;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if is_first && !is_tls([kind, major, minor]) {
        // The alert tells a peer without TLS that this side uses TLS. The peer may be gone.
        let _ = socket.write_all(&NOT_TLS);
        return Err(TlsError::PlaintextPeer);
    }
    if length > MAX_CIPHERTEXT {
        return Err(TlsError::Handshake(rustls::Error::PeerSentOversizedRecord));
    }
    let at = received.len();
    received.extend_from_slice(&header);
    received.resize(at + HEADER + length, 0);
    read_exact(socket, &mut received[at + HEADER..])
}

fn read_exact(socket: &mut BoundedSocket<'_>, to: &mut [u8]) -> Result<(), TlsError> {
    let read = socket.read_exact(to);
    read.map_err(|error| socket.explain(error))
}

/// Sends rustls's alert to the peer, which may be gone.
fn send_alert<C: Connection>(
    connection: &mut C,
    to_send: &mut Vec<u8>,
    socket: &mut BoundedSocket<'_>,
) {
    // Processing without anything to send would repeat discarded messages, and rustls would panic.
    while connection.common().wants_write() {
        match connection.process(&mut []).state {
            Ok(ConnectionState::EncodeTlsData(message)) => encode(message, to_send),
            _ => break,
        }
    }
    let _ = socket.write_all(to_send);
}
