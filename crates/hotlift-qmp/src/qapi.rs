//! QAPI: the types of QMP's answers. The client that reads answers, the server that writes them, and the schema share these
//! types.

use serde::Serialize;
use serde_json::Value;

/// Serialises an answer.
pub fn to_value(answer: &impl Serialize) -> Value {
    // Member names are strings, so the serialisation cannot fail.
    serde_json::to_value(answer).unwrap_or_default()
}

/// Type of a command's argument, or of a member of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// A string.
    Str,
    /// `true` or `false`.
    Bool,
    /// An integer.
    Int,
    /// Any number.
    Number,
    /// A string of the enumeration with this name in the schema.
    Enum(&'static str),
    /// The object with this name in the schema.
    Object(&'static str),
    /// A list whose elements have the type with this name in the schema.
    List(&'static str),
}

impl Type {
    /// Returns the type's name in the schema; for a list the name of its elements.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Str => "str",
            Self::Bool => "boolean",
            Self::Int => "int",
            Self::Number => "number",
            Self::Enum(name) | Self::Object(name) | Self::List(name) => name,
        }
    }
}

/// An argument of a command, or a member of an object.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Name.
    pub name: &'static str,
    /// Type.
    pub kind: Type,
    /// True if the member may be absent.
    pub optional: bool,
}

/// An object type with its members.
#[derive(Debug, Clone, Copy)]
pub struct Object {
    /// Name in QEMU's documentation.
    pub name: &'static str,
    /// Members.
    pub members: &'static [Member],
}

/// Creates a required member.
#[must_use]
pub const fn needed(name: &'static str, kind: Type) -> Member {
    Member {
        name,
        kind,
        optional: false,
    }
}

/// Creates an optional member.
#[must_use]
pub const fn optional(name: &'static str, kind: Type) -> Member {
    Member {
        name,
        kind,
        optional: true,
    }
}

/// A Rust type that can be the type of a member.
pub trait Qapi {
    /// Type in the schema.
    const TYPE: Type;
}

impl Qapi for String {
    const TYPE: Type = Type::Str;
}

impl Qapi for bool {
    const TYPE: Type = Type::Bool;
}

impl Qapi for u32 {
    const TYPE: Type = Type::Int;
}

impl Qapi for u64 {
    const TYPE: Type = Type::Int;
}

impl Qapi for f64 {
    const TYPE: Type = Type::Number;
}

impl<T: Qapi> Qapi for Vec<T> {
    const TYPE: Type = Type::List(T::TYPE.name());
}

/// Creates a struct and a row of `OBJECTS` for each object. A member consists of its QMP name, its field, and the field's type.
/// After `=` follows the schema type, if it cannot be derived from the field's type: for example, for a string that is an
/// enumeration in the schema. Optional members are [`Option`]s.
macro_rules! objects {
    ($(
        $(#[$meta:meta])*
        $object:ident = $qapi:literal {
            needed { $($(#[$needed_meta:meta])* $needed_name:literal $needed:ident: $needed_type:ty $(= $needed_kind:expr)?,)* }
            optional { $($(#[$optional_meta:meta])* $optional_name:literal $optional:ident: $optional_type:ty $(= $optional_kind:expr)?,)* }
        }
    )*) => {
        $(
            #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
            $(#[$meta])*
            pub struct $object {
                $(
                    $(#[$needed_meta])*
                    #[serde(rename = $needed_name)]
                    pub $needed: $needed_type,
                )*
                $(
                    $(#[$optional_meta])*
                    #[serde(rename = $optional_name, default, skip_serializing_if = "Option::is_none")]
                    pub $optional: Option<$optional_type>,
                )*
            }

            impl $crate::qapi::Qapi for $object {
                const TYPE: $crate::qapi::Type = $crate::qapi::Type::Object($qapi);
            }
        )*

        /// Object types of this file, for the schema.
        pub(crate) static OBJECTS: &[$crate::qapi::Object] = &[$(
            $crate::qapi::Object {
                name: $qapi,
                members: &[
                    $($crate::qapi::needed(
                        $needed_name,
                        $crate::qapi::objects!(@kind $needed_type $(, $needed_kind)?),
                    ),)*
                    $($crate::qapi::optional(
                        $optional_name,
                        $crate::qapi::objects!(@kind $optional_type $(, $optional_kind)?),
                    ),)*
                ],
            },
        )*];
    };
    (@kind $type:ty) => { <$type as $crate::qapi::Qapi>::TYPE };
    (@kind $type:ty, $kind:expr) => { $kind };
}

pub(crate) use objects;
